"""Circular buffers of tiles in shared memory, in the terms of CUTLASS.

    producer    producer_acquire: wait until a stage is empty; TMA load; full barrier completes
    consumer    consumer_wait: wait until it is full; read; consumer_release: it is empty again

A PipelineState counts stages around the buffer and the parity of each use. A producer starts at
phase 1: a wait for that parity of a new mbarrier returns at once, as all stages are empty.
"""

from typing import NamedTuple

from sparseflash.backends.hopper.device.barriers import named_barrier_arrive, named_barrier_wait
from sparseflash.backends.hopper.device.gluon_compat import (
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
)


class Pipeline(NamedTuple):
    """Stages of one tile each, [STAGES, *tile], with two mbarriers per stage."""

    buffers: gl.shared_memory_descriptor
    full_barriers: gl.shared_memory_descriptor
    empty_barriers: gl.shared_memory_descriptor


class NamedBarrierPipeline(NamedTuple):
    """A Pipeline with named barriers in place of empty mbarriers.

    Each warp of a consumer releases a stage on its own. Before it arrives at an mbarrier Triton
    synchronises the whole warpgroup.

    empty_barriers: number of the named barrier of stage 0, counted from FIRST_PIPELINE_BARRIER;
        those of the other stages follow
    num_threads:    threads that take part in each barrier, those of the producer included
    """

    buffers: gl.shared_memory_descriptor
    full_barriers: gl.shared_memory_descriptor
    empty_barriers: gl.tensor
    num_threads: gl.tensor


class PipelineState(NamedTuple):
    """Where a producer or consumer is: the stage, and the parity of its use."""

    stage: gl.tensor
    phase: gl.tensor


@gluon.jit
def make_pipeline(descriptor, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """STAGES stages for the tiles of a descriptor; CONSUMERS partitions release each stage."""
    full_barriers, empty_barriers = make_mbarriers(STAGES, 1), make_mbarriers(STAGES, CONSUMERS)
    return Pipeline(allocate_stages(descriptor, STAGES), full_barriers, empty_barriers)


@gluon.jit
def make_named_barrier_pipeline(descriptor, FIRST: gl.constexpr, STAGES: gl.constexpr,
                                WARPGROUPS: gl.constexpr,
                                LOAD_WAIT_WARPS: gl.constexpr = 0):  # fmt: skip
    """STAGES stages for the tiles of a descriptor, with named barriers from FIRST on.

    All warpgroups and LOAD_WAIT_WARPS warps release each stage. Each of them calls
    `release_all_stages` first.
    """
    threads: gl.constexpr = 128 * WARPGROUPS + 32 * (1 + LOAD_WAIT_WARPS)
    buffers, full_barriers = allocate_stages(descriptor, STAGES), make_mbarriers(STAGES, 1)
    return NamedBarrierPipeline(buffers, full_barriers, FIRST, threads)


@gluon.jit
def allocate_stages(descriptor, STAGES: gl.constexpr):
    shape: gl.constexpr = [STAGES] + descriptor.block_type.shape  # noqa: RUF005 (no star in Gluon)
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def make_mbarriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """STAGES mbarriers, each of which completes after COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=COUNT)
    return barriers


@gluon.jit
def advance(state, STAGES: gl.constexpr):
    """The state of the next stage."""
    stage, phase = state.stage + 1, state.phase
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return PipelineState(stage, phase)


@gluon.jit
def warpgroup_state(state, WARPGROUPS: gl.constexpr, warpgroup):
    """The state of a warpgroup's own buffer, where a stage has one buffer for each warpgroup."""
    return PipelineState(state.stage * WARPGROUPS + warpgroup, state.phase)


@gluon.jit
def producer_acquire(pipeline, state):
    """Waits until all consumers have released a stage. Named barriers ignore the phase."""
    if isinstance(pipeline.empty_barriers, gl.shared_memory_descriptor):
        mbarrier.wait(pipeline.empty_barriers.index(state.stage), state.phase)
    else:
        named_barrier_wait(pipeline.empty_barriers + state.stage, pipeline.num_threads)


@gluon.jit
def producer_commit(pipeline, state):
    """Signals that a stage is full, if no TMA load does."""
    mbarrier.arrive(pipeline.full_barriers.index(state.stage), count=1)


@gluon.jit
def producer_load(pipeline, descriptor, batch, head, token, state):
    """Acquires a stage and loads the tile that starts at `token` of a head into it.

    TMA fills the part of the tile that is past the sequence with zeros.
    """
    producer_acquire(pipeline, state)
    full_barrier = pipeline.full_barriers.index(state.stage)
    # Before the load: the barrier completes when these bytes have arrived.
    mbarrier.expect(full_barrier, descriptor.block_type.nbytes)
    tile = stage_tile(pipeline, state.stage, descriptor)
    tma_load(descriptor, [batch, head, token, 0], full_barrier, tile)


@gluon.jit
def release_all_stages(pipeline):
    """Releases all stages of a pipeline with named barriers, since all are empty at first."""
    STAGES: gl.constexpr = pipeline.buffers.shape[0]
    for stage in gl.static_range(STAGES):
        consumer_release(pipeline, PipelineState(stage, 0))


@gluon.jit
def consumer_wait(pipeline, state):
    """Waits until a stage is full."""
    mbarrier.wait(pipeline.full_barriers.index(state.stage), state.phase)


@gluon.jit
def consumer_release(pipeline, state):
    """Signals that this consumer has read a stage; the producer may then overwrite it."""
    if isinstance(pipeline.empty_barriers, gl.shared_memory_descriptor):
        mbarrier.arrive(pipeline.empty_barriers.index(state.stage), count=1)
    else:
        named_barrier_arrive(pipeline.empty_barriers + state.stage, pipeline.num_threads)


@gluon.jit
def stage_tile(pipeline, stage, descriptor):
    """The beginning of a stage as a tile of another descriptor."""
    shape: gl.constexpr = descriptor.block_type.shape
    buffer = pipeline.buffers.index(stage)
    return reinterpret(buffer, descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def stage_as(pipeline, stage, TOKENS: gl.constexpr, DIMS: gl.constexpr):
    """The beginning of a stage as a tile [1, 1, TOKENS, DIMS]."""
    buffer = pipeline.buffers.index(stage)
    if buffer.shape[2] != TOKENS or buffer.shape[3] != DIMS:
        buffer = reinterpret(buffer, buffer.dtype, [1, 1, TOKENS, DIMS], buffer.layout)
    return buffer


@gluon.jit
def stage_matrix(pipeline, stage):
    """A stage as a matrix [tokens, dims]."""
    return as_matrix(pipeline.buffers.index(stage))


@gluon.jit
def as_matrix(buffer):
    """A tile [1, 1, tokens, dims] as a matrix [tokens, dims]."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])
