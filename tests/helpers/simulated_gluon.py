"""A stand-in for hopper.device.gluon_compat and hopper.device.barriers: kernels run on the CPU.

The simulation is as unfavourable as the hardware may be, and the same at every run. The partitions
of a program run one at a time: one that waits at a barrier, or arrives at one, is suspended until
all others that can continue have run; with ORDER the first or the last of those that can continue
runs, as far ahead as it may. A copy into shared memory destroys its target at once and completes
when a partition waits for it; a product reads its operands, and a store its buffer, when it is
waited for. So a stage that is released too early, or read before it is full, gives wrong numbers,
and a missing arrival a deadlock, which is reported with what every partition waits for. A missing
fence is not found.
"""

import threading
from bisect import bisect_right
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

ORDER = None  # round robin; min or max: of the partitions that can continue
PIPELINE_BARRIERS = 9  # the other named barriers are for ping-pong, for warps, and Triton's
_partition = threading.local()  # its number and program, and what it has in flight


class Failure(Exception):
    """A protocol is broken."""


class Partitions:
    """The partitions of programs that run at the same time, each a thread. One runs at a time.

    work: (program, function, arguments) of each partition
    """

    def __init__(self, work):
        # One that can run has its lock released. A semaphore, made of Python, takes twice as long.
        self.turns = [threading.Lock() for _ in work]
        self.waits = {number: (lambda: True, "to begin") for number in range(len(work))}
        self.failure: Exception | None = None
        self.threads = [
            threading.Thread(target=self.run, args=(number, *entry), daemon=True)
            for number, entry in enumerate(work)
        ]

    def join(self):
        for turn, thread in zip(self.turns, self.threads, strict=True):
            turn.acquire()
            thread.start()
        self.turns[0].release()
        for thread in self.threads:
            thread.join()
        if self.failure:
            raise self.failure

    def run(self, number, program, function, arguments):
        _partition.number, _partition.program = number, program
        try:
            self.wait_to_run()
            _run(function, *arguments)
        except Exception as error:
            self.failure = self.failure or error
        self.waits.pop(number, None)
        self.resume_next()

    def wait(self, reached, what):
        """Suspends the partition until others have run and `reached()` holds."""
        self.waits[_partition.number] = (reached, what)
        self.resume_next()
        self.wait_to_run()

    def wait_to_run(self):
        self.turns[_partition.number].acquire()
        if self.failure:
            raise self.failure
        del self.waits[_partition.number]

    def resume_next(self):
        """Chooses the partition that runs next, of those that can continue; after a failure each
        of them, to end.
        """
        following = sorted(self.waits)
        if ORDER is max:
            following.reverse()
        elif ORDER is None:
            after = bisect_right(following, _partition.number)
            following = following[after:] + following[:after]
        for number in following:
            if self.failure or self.waits[number][0]():
                self.turns[number].release()
                return
        if following:
            what = {number: what for number, (_, what) in self.waits.items()}
            self.failure = Failure(f"deadlock, partitions wait for {what}")
            self.turns[following[0]].release()


def _run(function, *arguments, **constants):
    """Runs what one partition does, or a program without any."""
    _partition.products, _partition.stores = [], []
    function(*arguments, **constants)
    if _partition.products or _partition.stores:
        raise Failure("products or stores are left in flight")


class Real(float):
    @property
    def value(self):
        return self


class Integer(int):
    @property
    def value(self):
        return self


def constexpr(value):
    return {int: Integer, float: Real}.get(type(value), lambda same: same)(value)


class Pointer:
    def __init__(self, entries: Tensor, offset=0):
        self.entries, self.offset = entries, offset

    def __add__(self, offset):
        return Pointer(self.entries, self.offset + offset)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    def __init__(self, name):
        self.name = name
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies = []

    def change(self, arrivals=0, expected=0):
        self.pending -= arrivals
        self.bytes += expected
        if self.pending < 0 or self.bytes < 0:
            raise Failure("more arrivals or bytes at a barrier than it counts")
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def arrive(self, count, pred=True):
        if pred:
            self.change(arrivals=count)
            _partition.program.partitions.wait(lambda: True, "to be resumed")

    def wait(self, phase):
        self.complete_copies()
        while self.phase == phase:
            what = f"{self.name}, phase {phase}"
            _partition.program.partitions.wait(lambda: self.copies or self.phase != phase, what)
            self.complete_copies()

    def complete_copies(self):
        while self.copies:
            self.copies.pop(0)()


class SharedMemory:
    """A view of shared memory: a Buffer, or Barriers."""


class Buffer(SharedMemory):
    """One that holds numbers."""

    layout = None

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @property
    def shape(self):
        return list(self.tensor.shape)

    @property
    def dtype(self):
        return self.tensor.dtype

    def index(self, i):
        i, count = int(i), self.tensor.shape[0]
        if not 0 <= i < count:
            raise Failure(f"buffer {i} of {count}")
        return Buffer(self.tensor[i])

    def reshape(self, shape):
        return Buffer(self.tensor.view(shape))

    def permute(self, order):
        return Buffer(self.tensor.permute(order))

    def slice(self, start, length, dim):
        return Buffer(self.tensor.narrow(dim, start, length))

    def load(self, layout):
        return self.tensor.clone()

    def store(self, value):
        self.tensor.copy_(value)


class Barriers(SharedMemory, list):
    def index(self, i):  # as of shared memory, not of a list
        return self[int(i)]


class TensorDescriptor:
    def __init__(self, base, shape, strides, block_shape, layout):
        self.base, self.dtype, self.layout = base.detach(), base.dtype, layout
        size = torch.Size(block_shape).numel() * base.element_size()
        self.block_type = SimpleNamespace(shape=block_shape, nbytes=size)

    def window(self, start):
        """The part of the tensor that a tile covers, and the part of the tile that is inside."""
        start = [int(s) for s in start]
        inside = [
            max(0, min(n, full - s))
            for s, n, full in zip(start, self.block_type.shape, self.base.shape, strict=True)
        ]
        part = tuple(slice(s, s + n) for s, n in zip(start, inside, strict=True))
        return self.base[part], tuple(slice(0, n) for n in inside)


class Product:
    """A warpgroup_mma in flight: its operands are read when it is waited for."""

    def __init__(self, a, b, acc, use_acc):
        self.operands, self.acc, self.use_acc, self.result = (a, b), acc, use_acc, None

    def finish(self):
        if self.result is None:
            a, b = (x.tensor if isinstance(x, Buffer) else x for x in self.operands)
            self.result = a.float() @ b.float()
            if self.use_acc:
                self.result += self.acc.finish() if isinstance(self.acc, Product) else self.acc
        return self.result


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    product = Product(a, b, acc, use_acc)
    _partition.products.append(product)
    return product


def warpgroup_mma_wait(pendings, deps):
    while len(_partition.products) > pendings:
        _partition.products.pop(0).finish()
    if any(isinstance(dep, Product) and dep.result is None for dep in deps):
        raise Failure("a product is used that is still in flight")
    results = [dep.result if isinstance(dep, Product) else dep for dep in deps]
    return results[0] if len(results) == 1 else tuple(results)


def opaque(number):
    return number


def copy_registers(matrix):
    return matrix.clone()


def to_float32(matrix):
    return matrix.float()


def where_bit(word, bit, matrix):
    return torch.where((word & bit) != 0, matrix, 0.0)


def sync_warp(barrier):
    """A partition is one thread here."""


def sync_partition():
    """A partition is one thread here."""


def pingpong_wait(warpgroup, load_wait_warps):
    from_warpgroup, from_warps = _partition.program.pingpong, _partition.program.load_wait_signals
    _partition.program.partitions.wait(
        lambda: from_warpgroup[warpgroup] and from_warps[warpgroup] >= load_wait_warps,
        f"signals to warpgroup {warpgroup}",
    )
    from_warpgroup[warpgroup] -= 1
    from_warps[warpgroup] = 0


def signal_warpgroup(warpgroup, load_wait_warps):
    _partition.program.load_wait_signals[warpgroup] += 1
    _partition.program.partitions.wait(
        lambda: not _partition.program.load_wait_signals[warpgroup],
        f"warpgroup {warpgroup} to pass its ping-pong barrier",
    )


def pingpong_signal(warpgroup, warpgroups, load_wait_warps):
    following = (warpgroup + 1) % warpgroups
    _partition.program.pingpong[following] += 1
    if _partition.program.pingpong[following] > 1:
        raise Failure("a warpgroup is signalled again that has not passed its ping-pong barrier")


def named_barrier_arrive(number, threads):
    arrived = _partition.program.arrived[pipeline_barrier(number)]
    if _partition.number in arrived:
        raise Failure(f"a partition arrives at barrier {int(number)} again before it is awaited")
    arrived.add(_partition.number)
    if len(arrived) > arrivals_of(threads):
        raise Failure("more arrivals at a barrier than it counts")
    _partition.program.partitions.wait(lambda: True, "to be resumed")


def named_barrier_wait(number, threads):
    arrived = _partition.program.arrived[pipeline_barrier(number)]
    _partition.program.partitions.wait(
        lambda: len(arrived) == arrivals_of(threads), f"arrivals at {int(number)}"
    )
    arrived.clear()


BARRIERS = {
    function.__name__: function
    for function in (
        *(pingpong_wait, pingpong_signal, signal_warpgroup),
        *(named_barrier_arrive, named_barrier_wait, sync_warp),
    )
}  # in place of those of hopper.device.barriers


def arrivals_of(threads):
    """How many partitions, of four warps or of one, meet the one that waits."""
    return threads // 128 + threads % 128 // 32 - 1


def pipeline_barrier(number):
    if not 0 <= number < PIPELINE_BARRIERS:
        raise Failure(f"named barrier {int(number)} is none of a pipeline")
    return int(number)


def tma_load(descriptor, start, barrier, buffer):
    buffer.tensor.fill_(torch.nan)

    def complete():
        part, inside = descriptor.window(start)
        buffer.tensor.zero_()
        buffer.tensor[inside] = part
        barrier.change(expected=-descriptor.block_type.nbytes)

    barrier.copies.append(complete)


def reinterpret(buffer, dtype, shape, layout):
    return Buffer(buffer.tensor.view(-1).view(dtype)[: torch.Size(shape).numel()].view(shape))


def tma_store(descriptor, start, buffer):
    _partition.stores.append((Tensor.copy_, descriptor, start, buffer))


def tma_reduce_add(descriptor, start, buffer):
    _partition.stores.append((Tensor.add_, descriptor, start, buffer))


def tma_store_wait(pendings):
    while len(_partition.stores) > pendings:
        write, descriptor, start, buffer = _partition.stores.pop(0)
        part, inside = descriptor.window(start)
        write(part, buffer.tensor[inside])


def fence_async_shared():
    pass


def wait_for_count(counter, count):
    _partition.program.partitions.wait(
        lambda: _load(counter) >= count, f"count {int(count)} of tile {int(counter.offset)}"
    )


def count_completed_stores(counter):
    """Adds of a warp are complete when it has waited for its stores."""
    tma_store_wait(0)
    _store(counter, _load(counter) + 1)
    _partition.program.partitions.wait(lambda: True, "to be resumed")


def _init(barrier, count):
    barrier.count = barrier.pending = count


mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=_init,
    wait=Barrier.wait,
    arrive=Barrier.arrive,
    expect=lambda barrier, nbytes: barrier.change(arrivals=1, expected=nbytes),
)


def _allocate(dtype, shape, layout):
    if dtype == torch.int64:
        _partition.program.mbarriers += 1
        array = f"mbarrier array {_partition.program.mbarriers}"
        return Barriers(Barrier(f"{array}[{stage}]") for stage in range(shape[0]))
    return Buffer(torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype))


def _load(pointer, mask=True, other=0):
    offset = torch.as_tensor(pointer.offset)
    if mask is True:  # of most loads, which are of one number
        return pointer.entries[offset].clone()
    mask = torch.as_tensor(mask).expand(offset.shape)
    found = pointer.entries[torch.where(mask, offset, 0)]
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype))


def _store(pointer, value, mask=True):
    offset = torch.as_tensor(pointer.offset)
    mask = torch.as_tensor(mask).expand(offset.shape)
    pointer.entries[offset[mask]] = value.expand(offset.shape)[mask].to(pointer.entries.dtype)


def _atomic_add(pointer, value, mask=True, sem=None):
    old = _load(pointer, mask)
    _store(pointer, old + value, mask)
    return old


def _warp_specialize(partitions, warps, registers):
    program = _partition.program
    program.pingpong, program.load_wait_signals = [0] * 3, [0] * 3
    program.arrived = [set() for _ in range(PIPELINE_BARRIERS)]
    program.work += [(program, *entry) for entry in partitions]


def _run_together(programs):
    """Runs the partitions of programs at the same time."""
    partitions = Partitions([entry for program in programs for entry in program.work])
    for program in programs:
        program.partitions = partitions
    partitions.join()


class Kernel(partial):
    """A jitted function: called by another, or launched with a grid."""

    def __init__(self, function):
        self.__name__ = function.__name__
        self.arg_names = function.__code__.co_varnames[: function.__code__.co_argcount]

    def __getitem__(self, grid):
        def launch(
            *arguments,
            num_warps,
            enable_fp_fusion,
            maxnreg=None,
            launch_cooperative_grid=False,
            **constants,
        ):
            arguments = [_argument(x) for x in arguments]
            programs = [
                SimpleNamespace(number=number, programs=grid[0], mbarriers=0, work=[])
                for number in range(grid[0])
            ]
            for program in programs:
                _partition.program = program
                _run(self, *arguments, **constants)
                if program.work and not launch_cooperative_grid:
                    _run_together([program])
            if launch_cooperative_grid:
                _run_together(programs)

        return launch


def _argument(x):
    """Tensors as pointers, integers as those of 32 bits that they are in a kernel."""
    if isinstance(x, Tensor):
        return Pointer(x.detach().view(-1))
    return torch.tensor(x, dtype=torch.int32) if isinstance(x, int) else x


class SharedLayout:
    def __init__(self, *_):
        pass

    @staticmethod
    def get_default_for(shape, dtype):
        return None


def _jit(function=None, **settings):
    return Kernel if function is None else Kernel(function)


def _tensors(function):
    return lambda *values: function(*map(torch.as_tensor, values))


def wide_product(word: Tensor, multiplier: int):
    """The halves of the products of words, all unsigned though their type is signed."""
    product = (word.long() & 0xFFFFFFFF) * multiplier
    # Where an int64 wraps, its bits are those of the unsigned product.
    return (product >> 32).to(torch.int32), product.to(torch.int32)


def _static_assert(holds, message):
    if not holds:
        raise ValueError(message)


# In place of Triton, in code that Triton and Gluon share.
tl = SimpleNamespace(
    constexpr=constexpr,
    tensor=Tensor,
    expand_dims=Tensor.unsqueeze,
    maximum=_tensors(torch.maximum),
    minimum=_tensors(torch.minimum),
    load=_load,
    static_assert=_static_assert,
    static_range=range,
    **{name: getattr(torch, name) for name in ("int64", "abs", "exp", "exp2", "where")},
)
triton = SimpleNamespace(jit=_jit, language=tl)
gluon = SimpleNamespace(jit=_jit, constexpr_function=lambda function: function)
gl = SimpleNamespace(
    constexpr=constexpr,
    tensor=Tensor,
    shared_memory_descriptor=SharedMemory,
    **{
        name: getattr(torch, name) for name in ("int32", "int64", "float32", "float16", "bfloat16")
    },
    **dict.fromkeys(("NVMMADistributedLayout", "SwizzledSharedLayout"), lambda *_: None),
    **dict.fromkeys(("SliceLayout", "BlockedLayout"), lambda *_: None),
    DotOperandLayout=lambda **_: None,
    DistributedLinearLayout=lambda *_: None,
    NVMMASharedLayout=SharedLayout,
    program_id=lambda axis: torch.tensor(_partition.program.number),
    num_warps=lambda: 4,
    num_programs=lambda axis: _partition.program.programs,
    static_assert=_static_assert,
    static_range=range,
    warp_specialize=_warp_specialize,
    allocate_shared_memory=_allocate,
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    arange=lambda start, end, layout: torch.arange(start, end),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    zeros_like=torch.zeros_like,
    full=lambda shape, value, dtype, layout: torch.zeros(shape, dtype=dtype) + value,
    convert_layout=lambda tensor, layout, assert_trivial=False: tensor,
    expand_dims=Tensor.unsqueeze,
    maximum=_tensors(torch.maximum),
    minimum=_tensors(torch.minimum),
    where=_tensors(torch.where),
    cdiv=lambda a, b: -(-a // b),
    max=lambda tensor, axis: tensor.amax(axis),
    sum=lambda tensor, axis: tensor.sum(axis, dtype=tensor.dtype),
    map_elementwise=lambda function, *tensors: function(*tensors),
    exp2=torch.exp2,
    log2=torch.log2,
)
