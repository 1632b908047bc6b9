// What every transport of the CUDA column stands on: the number of the round, the mask, waits with a deadline and a
// sentence, and the comparison of what ranks say about a step.
//
// Round number. Graphs replay in any order, so it cannot be a launch argument. One 64-bit counter per rank, the ticket:
// every block reads it when it begins, and adds its share when it ends: block 0 kTicket - (blocks - 1), every other
// block 1, so that a launch adds kTicket in all, whatever its grid. A block that begins finds ticket / kTicket = rounds
// completed, however many blocks have ended already, for the sum of a launch reaches kTicket only after this block has
// added its own share. Example, kTicket = 65536, 3 blocks, 2 rounds completed: the ticket is 131072. Block 1 ends
// first: 131073; block 0: 196607; block 2 begins only now, finds 196607 / 65536 = 2 and runs round 3 like the others;
// it ends: 196608 = 3 * 65536.
// A start and its wait add half a round each, so the ticket also tells a kernel whether a start is without its wait:
// after a start of round 4 it is 196608 + 32768. No other kernel may run then (csrc/transport/fence.h): one that finds
// itself there leaves a record and ends without having done anything, and so does a wait that finds no start. All
// blocks of a launch decide alike, however many have ended: the remainder of the ticket is exactly kPhase only between
// a start and its wait. With at most kMaxBlocks blocks, the partial sums of a whole op leave less than kMaxBlocks or at
// least kTicket - kMaxBlocks, those of a start less than kMaxBlocks or kPhase - kMaxBlocks to kPhase - 1, and those of
// a wait at least kPhase, so that its blocks ask for no more than that.
//
// Rounds of all transports of a communicator share the counter and the history of kinds. Each of them lets no rank end
// round n before it has heard in round n from every peer, so a rank in round n + 1 knows that its peers have completed
// round n - 1; what a transport may overwrite, it derives from that.
#pragma once

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/launch.h"
#include "csrc/transport/lamport.h"

namespace moe_ep::cuda {

constexpr unsigned long long kTicket = 1ull << 16;  // a round
constexpr unsigned long long kPhase = kTicket / 2;  // a start, or its wait

// How a round is noted in DeviceState::kinds: fence rounds by their OpKind, which step 2 of the fence asks for.
constexpr uint32_t kLamportRound = 3;
// Ranks that disagreed about the op may each remember another kind. Every one of them has heard a peer that differs, so
// all note this, and all post and await done words in the next round.
constexpr uint32_t kDisputedRound = 0;

__device__ __forceinline__ void hold_up(int64_t cycles) {
  if (cycles <= 0) return;
  const long long start = clock64();
  while (clock64() - start < cycles) __nanosleep(200);
}

// Of the launch, all blocks together: kTicket or kPhase. Nobody waits for the sum.
__device__ __forceinline__ void add_ticket(const DeviceComm& comm, unsigned long long of_launch) {
  atomicAdd(&comm.state->ticket, blockIdx.x == 0 ? of_launch - (gridDim.x - 1) : 1ull);
}
// What was done before this kernel.
struct Progress {
  uint64_t rounds;  // completed
  bool started;  // a start is without its wait; in a wait also when some of its blocks have ended
};
__device__ __forceinline__ Progress progress(const DeviceComm& comm, Phase phase = Phase::kWhole) {
  const unsigned long long ticket = *reinterpret_cast<volatile unsigned long long*>(&comm.state->ticket);
  const unsigned long long part = ticket % kTicket;
  return {ticket / kTicket, phase == Phase::kWait ? part >= kPhase : part == kPhase};
}
__device__ __forceinline__ void note_kind(const DeviceComm& comm, uint64_t round, uint32_t kind) {
  *const_cast<volatile unsigned char*>(&comm.state->kinds[round & 3]) = static_cast<unsigned char>(kind);
}

// The OpKind of the start that is without its wait, or 0.
__device__ __forceinline__ int32_t started_kind(const DeviceComm& comm, const Progress& before) {
  return before.started ? *const_cast<volatile unsigned char*>(&comm.state->kinds[(before.rounds + 1) & 3]) : 0;
}
// Whether an op follows from that. `pending`: of a wait.
__device__ __forceinline__ bool follows(const DeviceComm& comm, const Progress& before, OpKind kind, Phase phase,
                                        const int64_t* pending) {
  if (phase != Phase::kWait) return !before.started;
  return started_kind(comm, before) == static_cast<int32_t>(kind) &&
         *pending == static_cast<int64_t>(before.rounds + 1);
}

// The first record stays until the host has read it.
__device__ __forceinline__ void record(const DeviceComm& comm, OpKind kind, uint64_t round, int32_t peer,
                                       PostMortem::What what, int32_t field, int64_t mine, int64_t theirs) {
  if (atomicCAS(&comm.state->failed, 0u, 1u) != 0u) {
    // Let the first one finish before this one traps.
    if (what != PostMortem::kDisagree && what != PostMortem::kMisused) __nanosleep(1000000);
    return;
  }
  volatile PostMortem* out = comm.post_mortem;
  out->op = static_cast<int32_t>(kind);
  out->round = static_cast<int64_t>(round);
  out->peer = peer;
  out->field = field;
  out->mine = mine;
  out->theirs = theirs;
  out->timeout_sec = comm.timeout_sec;
  fence_sys();
  out->what = what;
  fence_sys();
}
// By one thread of the launch.
__device__ __forceinline__ void record_misuse(const DeviceComm& comm, const Progress& before, OpKind kind, Phase phase,
                                              const int64_t* pending) {
  record(comm, kind, before.rounds + 1, static_cast<int32_t>(phase), PostMortem::kMisused, started_kind(comm, before),
         phase == Phase::kWait ? *pending : 0, 0);
}

// A rank without peers: the mask of an op, and its end, by one thread that has called progress() before.
__device__ __forceinline__ uint64_t alone_mask(const DeviceComm& comm, const RankMask& mask, Phase phase) {
  if (phase == Phase::kWait) return comm.state->started_active[0];
  return mask.given ? mask.words[0] : comm.state->active[0];
}
__device__ __forceinline__ void end_alone(const DeviceComm& comm, const Progress& before, OpKind kind, Phase phase,
                                          const int64_t* pending) {
  if (!follows(comm, before, kind, phase, pending)) return record_misuse(comm, before, kind, phase, pending);
  atomicAdd(&comm.state->ticket, phase == Phase::kWhole ? kTicket : kPhase);
}

struct RoundShared {
  uint64_t active[kMaskWords];
  char* windows[kMaxRanks];  // base addresses
};

template <bool MASK>
class DeviceRound {
 public:
  // Touches only what no kernel writes, so it may run before the predecessor has ended.
  __device__ DeviceRound(const DeviceComm& comm, OpKind kind, RoundShared& shared)
      : comm_(comm), kind_(kind), round_shared_(shared) {
    for (int32_t p = static_cast<int32_t>(threadIdx.x); p < comm.ep_size; p += static_cast<int32_t>(blockDim.x)) {
      shared.windows[p] = comm.windows[p];
    }
  }

  __device__ void load_mask(const RankMask& mask) {
    if (MASK && threadIdx.x < kMaskWords) {
      round_shared_.active[threadIdx.x] = mask.given ? mask.words[threadIdx.x] : comm_.state->active[threadIdx.x];
    }
  }

  // Of a start, for its wait; by block 0.
  __device__ void keep_started_mask() {
    if (MASK && blockIdx.x == 0 && threadIdx.x < kMaskWords) {
      comm_.state->started_active[threadIdx.x] = round_shared_.active[threadIdx.x];
    }
  }
  __device__ void load_started_mask() {
    if (MASK && threadIdx.x < kMaskWords) {
      round_shared_.active[threadIdx.x] = comm_.state->started_active[threadIdx.x];
    }
  }

  // The last thing a block does.
  __device__ void end(unsigned long long of_launch = kTicket) {
    if (threadIdx.x == 0) add_ticket(comm_, of_launch);
  }

  // Valid after the first barrier that follows load_mask().
  __device__ bool is_active(int32_t rank) const {
    return !MASK || (round_shared_.active[rank / 64] >> (rank % 64) & 1) != 0;
  }
  __device__ bool is_peer(int32_t rank) const { return rank != comm_.rank && is_active(rank) && is_active(comm_.rank); }
  __device__ Window window(int32_t rank) const { return Window{round_shared_.windows[rank]}; }
  __device__ Window own() const { return Window{comm_.own_window}; }  // valid at once

 protected:
  // Tests only: holds the rank up.
  __device__ void delay(DelayPoint point) const { hold_up(comm_.delay_cycles[static_cast<int>(point)]); }

  // A wait ends when ready() is true; when, looked at now and then, give_up() is; or at the deadline, in a trap.
  template <class Ready, class GiveUp>
  __device__ bool poll(uint64_t round, int32_t peer, PostMortem::What what, const Ready& ready, const GiveUp& give_up) {
    if (ready()) return true;
    const long long start = clock64();
    for (uint32_t i = 1;; ++i) {
      if (ready()) return true;
      if (i % 4096 == 0 && give_up()) return false;
      if (clock64() - start > comm_.timeout_cycles) {
        if (ready()) return true;
        record(round, peer, what, 0, 0, 0);
        __trap();
      }
    }
  }

  // The same for a whole warp, whose lanes stay together: ready() and give_up() are called by all of them and say one
  // thing to all.
  template <class Ready, class GiveUp>
  __device__ bool poll_together(uint64_t round, int32_t peer, PostMortem::What what, const Ready& ready,
                                const GiveUp& give_up) {
    if (ready()) return true;
    const long long start = clock64();
    for (uint32_t i = 1;; ++i) {
      if (ready()) return true;
      if (i % 4096 == 0 && give_up()) return false;
      if (__any_sync(0xFFFFFFFFu, clock64() - start > comm_.timeout_cycles)) {
        if (ready()) return true;
        if (threadIdx.x % 32 == 0) record(round, peer, what, 0, 0, 0);
        __syncwarp();
        __trap();
      }
    }
  }

  // For give_up(), that of a wait for an earlier round's end: whether the peer has told of its step of this round.
  __device__ bool has_told(uint64_t round, int32_t p) const {
    if (flag_round(load_acquire_sys(own().flag(comm_.offsets, comm_.shape, round, p, 0))) >= round) return true;
    StepHeader theirs;
    int32_t kind;
    return comm_.shape.lamport_tokens > 0 && load_lamport_header(round, p, theirs, kind);
  }

  // For give_up(): whether the peer has told of a step of this round that is another one, so that what is awaited will
  // never come. It may have told so over either transport.
  __device__ bool tells_another_step(uint64_t round, int32_t p, const StepHeader& mine) {
    const uint64_t flag = load_acquire_sys(own().flag(comm_.offsets, comm_.shape, round, p, 0));
    if (flag_round(flag) >= round) {
      return disagrees(round, p, flag_kind(flag), mine, *own().header(comm_.offsets, comm_.shape, round, p));
    }
    if (comm_.shape.lamport_tokens == 0) return false;
    StepHeader theirs;
    int32_t kind;
    return load_lamport_header(round, p, theirs, kind) && disagrees(round, p, kind, mine, theirs);
  }

  // Whether all of the peer's header of this round has arrived over the Lamport transport.
  __device__ bool load_lamport_header(uint64_t round, int32_t p, StepHeader& header, int32_t& kind) const {
    const LamportVector* from = own().lamport_header(comm_.offsets, comm_.shape, round, p);
    LamportVector vectors[kLamportHeaderVectors];
#pragma unroll
    for (int i = 0; i < kLamportHeaderVectors; ++i) vectors[i] = load_vector(from + i);
    uint32_t words[3 * kLamportHeaderVectors];
    bool all = true;
#pragma unroll
    for (int i = 0; i < kLamportHeaderVectors; ++i) {
      all &= vectors[i].tag == lamport_tag(round);
#pragma unroll
      for (int w = 0; w < 3; ++w) words[3 * i + w] = vectors[i].word[w];
    }
    uint32_t* out = reinterpret_cast<uint32_t*>(&header);
#pragma unroll
    for (int w = 0; w < kHeaderWords; ++w) out[w] = words[w];
    kind = static_cast<int32_t>(words[kHeaderWords]);
    return all;
  }

  __device__ bool disagrees(uint64_t round, int32_t p, int32_t their_kind, const StepHeader& mine,
                            const StepHeader& theirs) {
    if (their_kind != static_cast<int32_t>(kind_)) {
      record(round, p, PostMortem::kDisagree, -1, static_cast<int64_t>(kind_), their_kind);
      return true;
    }
    for (int32_t field = 0; field < kHeaderFields; ++field) {
      const int64_t here = header_field(mine, field), there = header_field(theirs, field);
      if (here == there) continue;
      record(round, p, PostMortem::kDisagree, field, here, there);
      return true;
    }
    return false;
  }

  __device__ void record(uint64_t round, int32_t peer, PostMortem::What what, int32_t field, int64_t mine,
                         int64_t theirs) {
    cuda::record(comm_, kind_, round, peer, what, field, mine, theirs);
  }

  // Ends the block, for the op does not follow from what was started. By every thread, and in every block of the
  // launch.
  __device__ void refuse(Phase phase, const int64_t* pending = nullptr) {
    if (blockIdx.x == 0 && threadIdx.x == 0) record_misuse(comm_, progress(comm_), kind_, phase, pending);
    asm volatile("exit;" ::: "memory");
  }

  const DeviceComm& comm_;
  const OpKind kind_;

 private:
  RoundShared& round_shared_;
};

}  // namespace moe_ep::cuda
