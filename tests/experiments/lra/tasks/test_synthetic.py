from experiments.lra.tasks import Retrieval, Synthetic


def test_stand_ins_have_the_shape_of_their_task(tmp_path):
    samples = Synthetic(Retrieval()).splits(tmp_path)["train"]
    documents, label, _ = samples[0]
    assert [len(ids) for ids in documents] == [4096, 4096]
    assert 0 <= label < 2
