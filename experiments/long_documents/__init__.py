"""Classification of long documents, to measure the benefit of reading more of a document."""
