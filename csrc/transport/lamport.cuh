// The Lamport transport on a GPU; csrc/transport/lamport.h is the protocol and its argument.
//
// A warp is the unit of work: it puts or takes one piece of a row by itself, so no warp waits for another one before
// the block ends. Block 0 has the headers alone where there are other blocks. All blocks of all ranks of a device must
// be resident, as with the fence.
//
// Order. The stores of a round are relaxed and may arrive in any order; each vector speaks for itself. That a set is
// free again is known across a kernel boundary: what a kernel has loaded and stored is performed when it has completed,
// and the next one begins (griddepcontrol.wait) after that.
#pragma once

#include "csrc/transport/round.cuh"

namespace moe_ep::cuda {

struct LamportShared {
  RoundShared of_round;
};

template <bool MASK>
class DeviceLamport : public DeviceRound<MASK> {
  using Base = DeviceRound<MASK>;
  using Base::comm_;
  using Base::kind_;

 public:
  using Base::is_active;
  using Base::is_peer;
  using Base::own;
  using Base::window;

  __device__ DeviceLamport(const DeviceComm& comm, OpKind kind, LamportShared& shared)
      : Base(comm, kind, shared.of_round) {}

  // After the predecessor has ended. Holds a barrier; the number of the round is on its way beside whatever is loaded
  // next.
  __device__ void begin(const RankMask& mask) {
    Base::load_mask(mask);
    __syncthreads();
    ticket_ = *reinterpret_cast<volatile unsigned long long*>(&comm_.state->ticket);
  }
  // Before a thread's first store: ends the block where a start waits for its wait. Not at once in begin(), for a
  // branch waits for the number of the round.
  __device__ void confirm() {
    asm volatile("" : "+l"(ticket_)::"memory");
    if (ticket_ % kTicket == kPhase) Base::refuse(Phase::kWhole);
  }
  __device__ uint64_t round() const { return ticket_ / kTicket + 1; }
  __device__ uint32_t tag() const { return lamport_tag(round()); }

  // Before anything is put: a peer that may have been masked has completed round n - 2.
  __device__ void await_reuse() {
    Base::delay(DelayPoint::kBeforePut);
    if constexpr (MASK) {
      confirm();
      for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
        if (!is_peer(p)) continue;
        if (blockIdx.x == 0) {
          fence_sys();
          store_relaxed_sys(window(p).done(comm_.offsets, comm_.rank), round() - 1);
        }
        if (round() <= 2) continue;
        const uint64_t* word = own().done(comm_.offsets, p);
        Base::poll(
            round(), p, PostMortem::kNoDone, [&] { return load_acquire_sys(word) >= round() - 2; },
            [] { return false; });
      }
      __syncthreads();
    }
  }

  // Step 1, by block 0: a thread per peer.
  template <class Header>
  __device__ void put_header(const Header& make) {
    confirm();
    if (threadIdx.x == 0) note_kind(comm_, round(), kLamportRound);
    Base::delay(DelayPoint::kBeforeFlag);
    const StepHeader header = make();
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&header);
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      if (!is_peer(p)) continue;
      LamportVector* to = window(p).lamport_header(comm_.offsets, comm_.shape, round(), comm_.rank);
#pragma unroll
      for (int i = 0; i < kLamportHeaderVectors; ++i) {
        uint32_t w[kLamportWords];
#pragma unroll
        for (int j = 0; j < kLamportWords; ++j) {
          const int at = kLamportWords * i + j;
          w[j] = at < kHeaderWords ? words[at < kHeaderWords ? at : 0] : static_cast<uint32_t>(kind_);
        }
        store_vector(to + i, w[0], w[1], w[2], tag());
      }
    }
  }

  // The end of step 1, by block 0: the headers of all peers, compared.
  template <class Header>
  __device__ void check_headers(const Header& mine) {
    __syncthreads();  // the kind of the round is noted
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm_.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      if (!is_peer(p)) continue;
      StepHeader theirs;
      int32_t kind;
      const bool came = Base::poll(
          round(), p, PostMortem::kNoHeader, [&] { return Base::load_lamport_header(round(), p, theirs, kind); },
          [&] { return Base::tells_another_step(round(), p, mine()); });
      if (!came || Base::disagrees(round(), p, kind, mine(), theirs)) note_kind(comm_, round(), kDisputedRound);
    }
  }

  // Step 3: the N vectors of peer p at from(0), from(1), ... that `wanted` has bits for, all loaded before any is
  // looked at again. `vectors` may hold loads of them made before. False: they will not come, which is on record.
  template <int N, class From, class Header>
  __device__ bool await(int32_t p, LamportVector (&vectors)[N], const From& from, unsigned wanted, const Header& mine) {
    return Base::poll(
        round(), p, PostMortem::kNoRows,
        [&] {
          if (missing_of(vectors, wanted) == 0) return true;
          load_missing(vectors, from, wanted);
          return missing_of(vectors, wanted) == 0;
        },
        [&] { return Base::tells_another_step(round(), p, mine()); });
  }

  // The same by a whole warp, until every lane has those that it needs. Others that are missing are loaded again along
  // with them, and may be there or not in the end.
  template <int N, class From, class Header>
  __device__ bool await_needed(int32_t p, LamportVector (&vectors)[N], const From& from, unsigned wanted,
                               unsigned needed, const Header& mine) {
    return Base::poll_together(
        round(), p, PostMortem::kNoRows,
        [&] {
          if (__all_sync(0xFFFFFFFFu, missing_of(vectors, needed) == 0)) return true;
          load_missing(vectors, from, wanted);
          return __all_sync(0xFFFFFFFFu, missing_of(vectors, needed) == 0) != 0;
        },
        [&] { return __any_sync(0xFFFFFFFFu, Base::tells_another_step(round(), p, mine())) != 0; });
  }

  // The round: puts(warp, warps) and takes(warp, warps) are called by every warp that has a share of them, all of which
  // it does; puts confirm() before they store. `early`: the next kernel's blocks may be launched once this rank has put
  // everything.
  template <class Header, class Puts, class Takes>
  __device__ void run(const Header& make, bool early, const Puts& puts, const Takes& takes) {
    await_reuse();
    const int32_t header_blocks = gridDim.x > 1 ? 1 : 0;
    const int32_t working = static_cast<int32_t>(gridDim.x) - header_blocks;
    const int32_t warps = static_cast<int32_t>(blockDim.x / 32) * working;
    // The warps of one block take work far apart, so that a small step uses every SM.
    const int32_t warp =
        static_cast<int32_t>(threadIdx.x / 32) * working + static_cast<int32_t>(blockIdx.x) - header_blocks;
    const bool works = static_cast<int32_t>(blockIdx.x) >= header_blocks;
    if (blockIdx.x == 0) put_header(make);
    if (works) puts(warp, warps);
    // One thread's call speaks for its block, hence the barriers.
    if (early) {
      __syncthreads();
      launch_dependents();
    }
    confirm();
    Base::delay(DelayPoint::kAfterFlags);
    if (works) takes(warp, warps);
    if (blockIdx.x == 0) check_headers(make);
    __syncthreads();
    // Not before every peer was heard: its kernel may need the room that the next kernel's blocks take.
    if (!early) launch_dependents();
    Base::end();
  }

 private:
  template <int N>
  __device__ unsigned missing_of(const LamportVector (&vectors)[N], unsigned wanted) const {
    unsigned missing = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) missing |= (wanted >> i & 1 && vectors[i].tag != tag() ? 1u : 0u) << i;
    return missing;
  }
  template <int N, class From>
  __device__ void load_missing(LamportVector (&vectors)[N], const From& from, unsigned wanted) const {
    const unsigned missing = missing_of(vectors, wanted);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (missing >> i & 1) vectors[i] = load_vector(from(i));
    }
  }

  unsigned long long ticket_ = 0;
};

}  // namespace moe_ep::cuda
