// What a kernel of this room is launched with, and the host object that holds it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/communicator.h"
#include "csrc/ep.h"
#include "csrc/window.h"

namespace moe_ep::cuda {

constexpr int kMaxBlocks = 512;  // flags per peer and parity
constexpr int kThreads = 256;    // of a block; two blocks share an SM

// Device memory of one rank that no peer sees. All state that changes from round to round is here and is advanced by
// the kernels, so that captured graphs replay in any order.
struct DeviceState {
  unsigned long long ticket;            // csrc/transport/round.cuh
  unsigned char kinds[4];               // op kind of round n at [n mod 4]
  unsigned int failed;                  // taken by the first thread that writes the post-mortem record
  unsigned long long active[kMaskWords];
  unsigned long long started_active[kMaskWords];  // of a start that is without its wait
};

// Written by a kernel into host memory when a wait outlives its deadline (then it traps) or ranks disagree (then it
// goes on). Host-mapped memory that does not belong to the CUDA context, so it can be read after the trap.
struct PostMortem {
  enum What : int32_t { kNothing = 0, kNoFlag, kNoDone, kNoHeader, kNoRows, kNotPut, kPutFailed, kDisagree, kMisused };
  int32_t what;
  int32_t op;
  int64_t round;
  int32_t peer;         // kMisused: the Phase of the op
  int32_t field;  // kDisagree: index into kHeaderFields, or -1: the op itself; kMisused: what was started, or 0
  int64_t mine, theirs;  // kDisagree; mine of kMisused: the round in `pending`
  int64_t timeout_sec;
};

// How a step is cut into blocks. Every rank computes the same plan, for block b of a rank exchanges with block b of
// its peers alone: flags are per block, and no block waits for another of its own grid.
//   block b = group * pieces + piece; its tokens are t = group, group + groups, ...; its bytes of every row are
//   [piece * piece_bytes, (piece + 1) * piece_bytes)
struct Plan {
  int32_t groups = 1;
  int32_t pieces = 1;
  int64_t piece_bytes = 0;
  int32_t threads = kThreads;
  bool descending = false;  // combine takes tokens from the last to the first
  int32_t blocks() const { return groups * pieces; }
};

struct DeviceComm {
  char* const* windows;  // [W] base addresses, in device memory
  char* own_window;
  DeviceState* state;
  PostMortem* post_mortem;
  unsigned long long* sent;  // [W, kCountedBlocks] bytes that counted writes have put at each rank, by block
  const uint32_t* endpoints;  // [W] logical endpoints of the windows
  WindowShape shape;
  Window::Offsets offsets;
  int32_t rank;
  int32_t ep_size;
  int64_t timeout_cycles;
  int64_t timeout_sec;
  int64_t delay_cycles[kDelayPoints];  // tests only
};

// The CUDA half of a communicator: state, tables, and the launch options its kernels share.
class DeviceEnd {
 public:
  DeviceEnd(int32_t device_index, const WindowShape& shape);
  ~DeviceEnd();
  DeviceEnd(const DeviceEnd&) = delete;
  DeviceEnd& operator=(const DeviceEnd&) = delete;

  // endpoints: of the windows, where they have any. Called again over a checkpoint, when all windows are zero again.
  void connect(const std::vector<char*>& windows, const std::vector<uint32_t>& endpoints);
  void set_active(const RankMask& mask);
  // Rounds begun. Waits for the device.
  uint64_t rounds() const;

  DeviceComm comm(const Communicator& owner, int64_t timeout_sec) const;
  // blocks: at most so many, beside max_blocks.
  Plan plan(int32_t tokens_per_rank, int64_t row_bytes, int32_t blocks = kMaxBlocks) const;

  // Throws the sentence of a failure that a kernel left behind. After a disagreement the communicator stays usable.
  void raise_failure(const Communicator& owner, OpKind next);
  std::string failure_text(const Communicator& owner) const;

  int32_t max_blocks = 1;  // agreed by all ranks
  // A kernel of up to so many blocks may let the next one's be launched while peers still run this round: all, where no
  // other rank needs room on this device.
  int32_t early_blocks = 0;
  bool pdl = false;
  Plan forced;  // benchmarks only: used when forced.piece_bytes is not 0

 private:
  void release();

  int32_t device_index_;
  WindowShape shape_;
  char** windows_ = nullptr;
  unsigned long long* sent_ = nullptr;
  uint32_t* endpoints_ = nullptr;
  DeviceState* state_ = nullptr;
  PostMortem* post_mortem_ = nullptr;  // host address
  PostMortem* post_mortem_device_ = nullptr;  // the same bytes
};

// Blocks of these kernels that the whole device holds at once, those of counted writes among them where they are asked
// for.
int32_t resident_blocks(int32_t device_index, CountedPuts counted = CountedPuts::kNone);

void dispatch(Communicator& comm, const DispatchArgs& args, void* stream);
void combine(Communicator& comm, const CombineArgs& args, void* stream);

// Whether a step is one that a transport for R of up to `most` (0: off) may take at all. One of two ops never is: the
// fence alone has a place between what is sent and what is awaited.
template <class Args>
bool in_reach(const Communicator& comm, const Args& args, int64_t most) {
  return args.phase == Phase::kWhole && most > 0 && args.tokens_per_rank <= most && comm.ep_size() > 1;
}

// Whether a step goes through the Lamport transport; the same on all ranks that agree about the step.
bool takes_lamport(const Communicator& comm, const DispatchArgs& args);
bool takes_lamport(const Communicator& comm, const CombineArgs& args);
void lamport_dispatch(Communicator& comm, const DispatchArgs& args, void* stream);
void lamport_combine(Communicator& comm, const CombineArgs& args, void* stream);

// The same for counted writes; asked for steps that Lamport does not take.
bool takes_counted(const Communicator& comm, const DispatchArgs& args);
bool takes_counted(const Communicator& comm, const CombineArgs& args);
void counted_dispatch(Communicator& comm, const DispatchArgs& args, void* stream);
void counted_combine(Communicator& comm, const CombineArgs& args, void* stream);
// Whether the compiler knew fabric.try_put.counted.
bool compiled_with_counted_writes();

}  // namespace moe_ep::cuda
