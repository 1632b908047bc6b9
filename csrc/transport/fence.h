// The fence transport: payload first, then one flag per peer with release order; the peer waits for the flag with
// acquire order and reads. This is its argument, for both columns, and its host side.
//
// A round is one dispatch or one combine. All ranks of a communicator issue the same sequence of rounds, numbered
// 1, 2, 3, ... Round n on rank s:
//   1. done      store n-1 into done[s] of every peer: "s has completed every round before n".
//   2. reuse     before the first byte that a slow peer might still need: wait until that peer has completed the last
//                round of the same kind (dispatch reuses the own stage and the rows of ids put at peers, combine
//                reuses landing slots at peers).
//   3. put       dispatch: own rows -> own stage, ids and weights -> peers. combine: partials -> peers' landing.
//   4. flag      header, then flag (n, kind) into slot [n mod 2][s] of every peer, release.
//   5. wait      for the flag of every peer in the own window, acquire.
//   6. get       dispatch: routed rows from peers' stages -> outputs. combine: reduce the own landing -> output.
//
// Why one set of stage, ids and landing is enough (and half the memory of two):
//   A flag of round m from peer p also says that p has completed every round before m. In the common sequence
//   dispatch, combine, dispatch, ... every rank that begins dispatch n has seen all flags of combine n-1, so every
//   peer has completed dispatch n-2: step 2 costs one comparison and never waits. Only when two rounds of one kind
//   follow each other (n-1 and n) is a word awaited that no flag implies: done >= n-1, which the peer posts as the
//   first thing in its round n, before it waits for anything. So no cycle of waits can form: step 2 of round n waits
//   for step 1 of round n, step 5 for step 4, and step 1 waits for nothing.
// Why two parities of flag and header are needed and enough:
//   A peer may be one round ahead of a rank that still waits for round n, since it needed only this rank's flag n. It
//   is never two ahead: for that it would need this rank's flag n+1.
// Example, W = 2, rank 1 slow, dispatch (round 1) then dispatch (round 2):
//   rank 0: stage A, flag 1, sees flag 1, gets, returns. Round 2: done[0] := 1 at rank 1; its own done[1] is 0 < 1:
//           waits, though its stage is its own memory, for rank 1 may still be reading A from it.
//   rank 1: sees flag 1, gets A, returns. Round 2: done[1] := 1 at rank 0.
//   rank 0: now writes B into its stage. Without step 2 rank 1 could have read B as round 1's rows.
//   (tests/test_protocol.py runs exactly this, with rank 1 held up between its flags and its gets.)
// A masked rank is neither sent to nor awaited, in any step.
//
// Two ops for one round: a start is steps 1 to 4, its wait steps 5 and 6. Nothing above bounds the time between steps 4
// and 5, so what holds for a rank that is slow there holds for one that computes there:
//   Peers may end round n and begin round n+1. If that is of the same kind, step 2 holds them until done >= n, which
//   this rank posts in its own round n+1, so after its wait. If it is of the other kind, it writes what this rank's
//   wait does not read: a combine writes landing slots, a dispatch the stages of peers (which they reuse after done >=
//   the dispatch before, posted by this rank after that dispatch's wait), ids and weights; flags and headers have the
//   other parity. They cannot begin round n+2: it needs this rank's flag n+1. This rank itself must not begin another
//   round before the wait: it would write into the stage that peers still read. So every other op is refused in
//   between. It must leave the inputs as they are: rows of the own rank are taken from them by the wait.
// Example, W = 2, rank 1 computes between dispatch_start and dispatch_wait (round 1), then combine (round 2), and
// dispatch (round 3):
//   rank 1: stage X, flag 1 to rank 0; computes.
//   rank 0: stage A, flag 1; sees flag 1, gets X, returns. Round 2: puts its partial for x into rank 1's landing,
//           flag 2 in slot 0; waits for rank 1's flag 2. Rank 1's ids, flag 1 in slot 1, and A are untouched.
//   rank 1: waits: sees flag 1, gets A, takes its own rows from its input. Round 2: done[1] := 1, flag 2.
//   rank 0: round 3: writes B over A: rank 1's flag 2 said that it has completed round 1.
//   With dispatch as round 2 rank 0 waits in step 2 until rank 1's done[1] = 1: B cannot come before A was read.
//   (tests/test_overlap.py runs both.)
// All ranks make a step of the same number of ops; headers carry it.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "csrc/communicator.h"
#include "csrc/transport/host_wait.h"

namespace moe_ep {

// The sentences of the protocol's failures, for both columns. `field` as in header_field(), or -1: the op itself.
std::string disagreement_text(const Communicator& comm, OpKind kind, uint64_t round, int32_t peer, int32_t field,
                              int64_t mine, int64_t theirs);
std::string timeout_text(const Communicator& comm, OpKind kind, uint64_t round, int32_t peer, const std::string& what,
                         int64_t timeout_sec);
std::string unusable_text(const Communicator& comm, OpKind kind, const std::string& failure);
// An op that does not follow from what was started: `started` is the op kind of the round that has been, or 0.
std::string misuse_text(const Communicator& comm, OpKind kind, Phase phase, int32_t started, uint64_t round,
                        int64_t pending);

class HostFence {
 public:
  // Step 1, or the return to a started round. Throws when the communicator is in use by another thread, failed before,
  // or is not in the state that the op follows from.
  template <class Args>
  HostFence(Communicator& comm, OpKind kind, const Args& args, const StepHeader& header)
      : comm_(comm),
        state_(comm.host()),
        kind_(kind),
        phase_(args.phase),
        mask_(comm.active_ranks(args.mask)),
        deadline_(args.timeout_sec) {
    const std::string failure = state_.failure();
    if (!failure.empty()) throw Error(unusable_text(comm, kind, failure));
    bool expected = false;
    if (!state_.busy.compare_exchange_strong(expected, true)) {
      throw ArgumentError(std::string(op_name(kind, phase_)) + ": communicator '" + comm.name() +
                          "' is in use by another thread; calls that run at once need two communicators");
    }
    const std::string misuse = find_misuse(header, phase_ == Phase::kWait ? *args.pending : 0);
    if (!misuse.empty()) {
      state_.busy.store(false);
      throw ArgumentError(misuse);
    }
    if (phase_ == Phase::kWait) {
      round_ = state_.started.round;
      mask_ = state_.started.mask;
    } else {
      round_ = ++state_.round;
    }
    if (is_active(mask_, comm.rank())) {
      for (int32_t i = 1; i < comm.ep_size(); ++i) {
        const int32_t peer = (comm.rank() + i) % comm.ep_size();  // staggered, so that ranks do not convoy
        if (is_active(mask_, peer)) peers_[num_peers_++] = peer;
      }
    }
    for (const int32_t* p = begin(); p != end() && phase_ != Phase::kWait; ++p) {
      store_release(comm.window(*p).done(comm.offsets(), comm.rank()), round_ - 1);
    }
  }
  ~HostFence() {
    if (phase_ == Phase::kWait) state_.started.round = 0;
    state_.busy.store(false);
  }
  HostFence(const HostFence&) = delete;
  HostFence& operator=(const HostFence&) = delete;

  static bool is_active(const RankMask& mask, int32_t rank) { return mask.words[rank / 64] >> (rank % 64) & 1; }

  uint64_t round() const { return round_; }
  const RankMask& mask() const { return mask_; }  // a wait's is that of its start
  const int32_t* begin() const { return peers_; }  // the active peers, this rank not among them
  const int32_t* end() const { return peers_ + num_peers_; }

  void delay(DelayPoint point) const {
    const int64_t usec = comm_.delay_usec[static_cast<int>(point)].load(std::memory_order_relaxed);
    if (usec > 0) std::this_thread::sleep_for(std::chrono::microseconds(usec));
  }

  // Step 2.
  void await_reuse(int32_t peer) {
    const uint64_t last = state_.last_round[static_cast<int>(kind_)];
    if (last == 0 || state_.heard[static_cast<size_t>(peer)] > last) return;
    const uint64_t* word = own().done(comm_.offsets(), peer);
    wait([&] { return load_acquire(word) >= last; }, peer, "completion of its earlier " + std::string(op_name(kind_)));
  }

  // Step 4.
  void signal(int32_t peer, const StepHeader& header) {
    const Window window = comm_.window(peer);
    *window.header(comm_.offsets(), comm_.shape(), round_, comm_.rank()) = header;
    store_release(window.flag(comm_.offsets(), comm_.shape(), round_, comm_.rank()),
                  make_flag(round_, static_cast<int32_t>(kind_), header.tokens));
  }

  // Ends a start.
  void leave_to_wait(const StepHeader& header, int64_t* pending) {
    *pending = static_cast<int64_t>(round_);
    state_.started.kind = kind_;
    state_.started.mask = mask_;
    state_.started.header = header;
    state_.started.round = round_;
  }

  // Step 5. Calls arrived(peer, header) for each peer in order of arrival. A peer whose header does not agree with
  // `mine` is not passed on; once all have arrived the disagreement is thrown, so that the round is complete on every
  // rank and the communicator stays usable.
  template <class Arrived>
  void wait_all(const StepHeader& mine, const Arrived& arrived) {
    int32_t pending[kMaxRanks];
    int32_t num_pending = static_cast<int32_t>(std::copy(begin(), end(), pending) - pending);
    std::string disagreement;
    while (num_pending > 0) {
      int32_t found = -1;
      wait(
          [&] {
            for (int32_t i = 0; i < num_pending && found < 0; ++i) {
              if (flag_round(load_acquire(own_flag(pending[i]))) >= round_) found = i;
            }
            return found >= 0;
          },
          pending[0], "flag");
      const int32_t peer = pending[found];
      pending[found] = pending[--num_pending];
      state_.heard[static_cast<size_t>(peer)] = round_;
      const StepHeader& theirs = *own().header(comm_.offsets(), comm_.shape(), round_, peer);
      const std::string text = compare(mine, theirs, peer, flag_kind(*own_flag(peer)));
      if (!text.empty()) {
        disagreement = text;
      } else {
        arrived(peer, theirs);
      }
    }
    state_.last_round[static_cast<int>(kind_)] = round_;
    if (!disagreement.empty()) throw Error(disagreement);
  }

 private:
  Window own() const { return comm_.window(comm_.rank()); }
  const uint64_t* own_flag(int32_t peer) const { return own().flag(comm_.offsets(), comm_.shape(), round_, peer); }

  template <class Ready>
  void wait(const Ready& ready, int32_t peer, const std::string& what) {
    const WaitEnd end = spin_until(ready, deadline_);
    if (end == WaitEnd::kReady) return;
    const std::string failure = end == WaitEnd::kDeadline
                                    ? timeout_text(comm_, kind_, round_, peer, what, deadline_.timeout_sec)
                                    : std::string(op_name(kind_)) + " round " + std::to_string(round_) +
                                          " was interrupted while it waited for rank " + std::to_string(peer);
    state_.fail(failure);
    throw TimeoutError(failure);
  }

  // Why the op does not follow from what was started, or "".
  std::string find_misuse(const StepHeader& header, int64_t pending) const;

  // Empty when the two ranks agree about the step, else one sentence with both ranks and both values.
  std::string compare(const StepHeader& mine, const StepHeader& theirs, int32_t peer, int32_t their_kind) const;

  Communicator& comm_;
  Communicator::HostState& state_;
  OpKind kind_;
  Phase phase_;
  RankMask mask_;
  Deadline deadline_;
  uint64_t round_ = 0;
  int32_t peers_[kMaxRanks];
  int32_t num_peers_ = 0;
};

}  // namespace moe_ep
