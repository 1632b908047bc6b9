// The fence transport on a GPU: csrc/transport/fence.h is the protocol and its argument; this adds what is different
// here.
//
// Blocks. Block b of a rank exchanges with block b of every peer alone (csrc/cuda/launch.h, Plan): it stages or puts
// its share of the rows, releases its own flag to each peer, awaits block b's flag of each peer, and takes its share.
// So there is no barrier across the grid, neither before a flag nor after. A block other than the first piece of its
// group also awaits the flag of that first piece, which put the group's ids.
//
// Reuse. A kernel of round n+1 starts after the whole kernel of round n on its rank has ended, and ends only after
// every block saw a flag of every peer. So a flag of round n+1 from any block of peer p says that p has completed
// round n in all its blocks, whatever the two grids were; that is what csrc/transport/fence.h builds on. Whether the
// round before was of the same kind, and so the done words must be posted and awaited, is kept in device memory
// (kinds). With rank masks a peer may have been left out of the rounds between; then done words are always posted and
// awaited.
//
// Order. All threads of a block store with weak stores; the barrier orders them before one warp's fence.acq_rel.sys,
// which orders them before that warp's relaxed flag stores (release pattern, cumulativity). A polling thread loads the
// flag with ld.acquire.sys; the barrier after it orders every thread's later loads.
//
// A peer whose step is another one than this rank's may post no word. What it tells of the round, over the fence or
// Lamport, says as much: it has completed the round before. So a wait for the word ends then too, and step 5 finds what
// the ranks do not agree about.
//
// A start and its wait are two kernels with the same plan; the boundary between them is one between kernels of a rank,
// as that between two rounds is. The mask of the round is kept in device memory by the start.
#pragma once

#include "csrc/transport/round.cuh"

namespace moe_ep::cuda {

// What a round finds when it begins.
enum class Before : int32_t {
  kOtherKind,  // the round before was of another kind
  kSameKind,  // or of one that the ranks did not agree about
  kMisuse  // the op does not follow from what was started
};

struct FenceShared {
  uint64_t round;
  Before before;
  RoundShared of_round;
  int32_t tokens[kMaxRanks];  // T of each peer of this round; 0 for a masked or disagreeing one
  StepHeader headers[kMaxRanks];  // block 0: of the peers
  uint64_t flags[kMaxRanks];  // block 0: their flags
};

template <bool MASK>
class DeviceFence : public DeviceRound<MASK> {
  using Base = DeviceRound<MASK>;

 public:
  static constexpr bool kCounted = false;
  using Base::is_active;
  using Base::is_peer;
  using Base::own;
  using Base::window;

  __device__ DeviceFence(const DeviceComm& comm, OpKind kind, FenceShared& shared)
      : Base(comm, kind, shared.of_round), shared_(shared) {}

  // After the predecessor has ended. A round, or its start.
  __device__ void begin(const RankMask& mask, Phase phase = Phase::kWhole) {
    phase_ = phase;
    Base::load_mask(mask);
    if (threadIdx.x == 0) {
      const uint32_t kinds = *reinterpret_cast<volatile uint32_t*>(comm_.state->kinds);
      const Progress before = progress(comm_);
      shared_.round = before.rounds + 1;
      const uint32_t kind = kinds >> 8 * (before.rounds & 3) & 0xFF;
      const bool same = kind == static_cast<uint32_t>(kind_) || kind == kDisputedRound;
      shared_.before = before.started ? Before::kMisuse : same ? Before::kSameKind : Before::kOtherKind;
      if (blockIdx.x == 0 && !before.started) note_kind(comm_, shared_.round, static_cast<uint32_t>(kind_));
    }
  }

  // The same for a wait: the round of its start goes on. Holds a barrier.
  __device__ void resume(const int64_t* pending) {
    Base::load_started_mask();
    if (threadIdx.x == 0) {
      const Progress before = progress(comm_, Phase::kWait);
      shared_.round = before.rounds + 1;
      shared_.before = follows(comm_, before, kind_, Phase::kWait, pending) ? Before::kOtherKind : Before::kMisuse;
    }
    __syncthreads();
    if (shared_.before == Before::kMisuse) Base::refuse(Phase::kWait, pending);
  }

  // Ends a start. `pending`: [1], what the wait has to bring.
  __device__ void leave_to_wait(int64_t* pending) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *pending = static_cast<int64_t>(round());
    Base::end(kPhase);
  }

  // Valid after the first barrier that follows begin().
  __device__ uint64_t round() const { return shared_.round; }

  // Steps 1 and 2. Every thread of the block calls it, after a barrier.
  __device__ void await_reuse() {
    Base::delay(DelayPoint::kBeforePut);
    if (!MASK && shared_.before == Before::kOtherKind) return;
    if (shared_.before == Before::kMisuse) Base::refuse(phase_);
    if (phase_ == Phase::kStart) Base::keep_started_mask();
    const bool same_kind = shared_.before == Before::kSameKind;
    if (blockIdx.x == 0) {
      for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
        if (!is_peer(p)) continue;
        fence_sys();
        store_relaxed_sys(window(p).done(comm_.offsets, comm_.rank), round() - 1);
      }
    }
    // With masks and another kind before, the round before that is the last that can matter.
    const uint64_t last = same_kind ? round() - 1 : round() - 2;
    if (round() > 2 || same_kind) {
      for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
        if (!is_peer(p)) continue;
        const uint64_t* word = own().done(comm_.offsets, p);
        Base::poll(
            round(), p, PostMortem::kNoDone, [&] { return load_acquire_sys(word) >= last; },
            [&] { return Base::has_told(round(), p); });
      }
    }
    __syncthreads();
  }

  // Before step 4, by block 0 alone: what this rank says of its step.
  __device__ void put_header(const StepHeader& header) {
    if (blockIdx.x != 0) return;
    constexpr int kWords = sizeof(StepHeader) / 16;
    const uint4* words = reinterpret_cast<const uint4*>(&header);
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < comm_.ep_size * kWords;
         i += static_cast<int32_t>(blockDim.x)) {
      const int32_t p = i / kWords;
      if (!is_peer(p)) continue;
      reinterpret_cast<uint4*>(window(p).header(comm_.offsets, comm_.shape, round(), comm_.rank))[i % kWords] =
          words[i % kWords];
    }
  }

  // Step 4. Holds the barrier after which this block's stores may be released.
  __device__ void signal(int32_t num_tokens) {
    Base::delay(DelayPoint::kBeforeFlag);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    fence_sys();
    for (int32_t i = 1 + static_cast<int32_t>(threadIdx.x); i < comm_.ep_size; i += 32) {
      const int32_t p = (comm_.rank + i) % comm_.ep_size;
      if (!is_peer(p)) continue;
      store_relaxed_sys(
          window(p).flag(comm_.offsets, comm_.shape, round(), comm_.rank, static_cast<int32_t>(blockIdx.x)),
          make_flag(round(), static_cast<int32_t>(kind_), num_tokens));
    }
  }

  // Step 5: for this block's flag and that of block `also`, each polled by a thread of its own. Holds the barrier after
  // which every thread may read.
  __device__ void await(int32_t also, const StepHeader& mine) {
    const int32_t block = static_cast<int32_t>(blockIdx.x);
    const int32_t flags = also == block ? comm_.ep_size : 2 * comm_.ep_size;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < flags; i += static_cast<int32_t>(blockDim.x)) {
      const bool first = i < comm_.ep_size;
      const int32_t p = first ? i : i - comm_.ep_size;
      const uint64_t flag = is_peer(p) ? await_flag(p, first ? block : also, mine) : 0;
      if (first && p != comm_.rank) {
        shared_.tokens[p] = flag_kind(flag) == static_cast<int32_t>(kind_) ? flag_tokens(flag) : 0;
      }
      if (first && block == 0 && is_peer(p)) {  // read on the way, compared by check_headers()
        shared_.flags[p] = flag;
        const StepHeader* from = own().header(comm_.offsets, comm_.shape, round(), p);
#pragma unroll
        for (int w = 0; w < static_cast<int>(sizeof(StepHeader)) / 16; ++w) {
          copy_async(reinterpret_cast<char*>(&shared_.headers[p]) + 16 * w,
                     reinterpret_cast<const char*>(from) + 16 * w);
        }
      }
    }
    __syncthreads();
    Base::delay(DelayPoint::kAfterFlags);
  }

  // After step 5 and off its critical path, by block 0 alone: compares what the ranks said. The threads that polled the
  // flags do it, for they have issued the copies.
  __device__ void check_headers(const StepHeader& mine) {
    if (blockIdx.x != 0) return;
    await_async_copies();
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      if (!is_peer(p)) continue;
      // A flag of 0: the wait was given up because of a disagreement, which is on record.
      if (shared_.flags[p] == 0 || Base::disagrees(round(), p, flag_kind(shared_.flags[p]), mine, shared_.headers[p])) {
        note_kind(comm_, round(), kDisputedRound);
      }
    }
  }

 protected:
  using Base::comm_;
  using Base::kind_;

 private:
  // The peer's flag of this round, or of kind 0 when the peer's step is another one, so that none will come.
  __device__ uint64_t await_flag(int32_t p, int32_t block, const StepHeader& mine) {
    const uint64_t* word = own().flag(comm_.offsets, comm_.shape, round(), p, block);
    uint64_t flag = 0;
    const bool came = Base::poll(
        round(), p, PostMortem::kNoFlag,
        [&] {
          flag = load_acquire_sys(word);
          return flag_round(flag) >= round();
        },
        [&] { return Base::tells_another_step(round(), p, mine); });
    return came ? flag : 0;
  }

  FenceShared& shared_;
  Phase phase_ = Phase::kWhole;
};

// A round of a block, or its start, or its wait. The header is whole in every block: a long wait compares headers.
template <Phase PHASE = Phase::kWhole, class Block, class Transport, class Params>
__device__ __forceinline__ void run_block(Block& block, Transport& transport, const Params& p) {
  if constexpr (PHASE == Phase::kWait) {
    transport.resume(p.args.pending);
    if (p.early) launch_dependents();
    block.take(step_header(p.args));
    transport.end(kPhase);
  } else if constexpr (PHASE == Phase::kStart) {
    transport.begin(p.args.mask, PHASE);
    block.send(step_header(p.args));
    if (p.early) launch_dependents();
    transport.leave_to_wait(p.args.pending);
  } else {
    transport.begin(p.args.mask);
    const StepHeader header = step_header(p.args);
    block.send(header);
    if (p.early) launch_dependents();  // the block has put everything
    block.take(header);
    transport.end();
  }
}

}  // namespace moe_ep::cuda
