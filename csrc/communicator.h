// A communicator is one rank's end of an expert-parallel group: its own window, its peers' windows, and the state
// that advances with every round. Graphs hold its name only; find() turns the name into the live object.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/ep.h"
#include "csrc/memory/memory.h"
#include "csrc/window.h"

namespace moe_ep {

struct CommunicatorOptions {
  std::string name;
  int32_t rank = 0;
  DeviceKind device = DeviceKind::kCpu;
  int32_t device_index = 0;
  std::string memory = "shm";  // on a GPU: "fabric", "posix_fd" or "cuda_ipc"
  bool enable_rank_mask = false;
  CountedPuts counted = CountedPuts::kNone;
  bool pdl = false;            // launch with programmatic dependent launch
  WindowShape shape;
};

// Where a test may hold a rank up, to make a race that is otherwise rare happen every time.
enum class DelayPoint : int32_t { kBeforePut = 0, kBeforeFlag = 1, kAfterFlags = 2, kBeforeRows = 3 };
constexpr int kDelayPoints = 4;

namespace cuda {
class DeviceEnd;
}

class Communicator {
 public:
  // Allocates this rank's window. Throws ArgumentError for a shape out of range, Error when memory is short.
  explicit Communicator(const CommunicatorOptions& options);
  ~Communicator();

  const std::string& name() const { return options_.name; }
  int32_t rank() const { return options_.rank; }
  int32_t ep_size() const { return options_.shape.ep_size; }
  const WindowShape& shape() const { return options_.shape; }
  const CommunicatorOptions& options() const { return options_; }
  const Window::Offsets& offsets() const { return offsets_; }
  WindowMemory& memory() { return *memory_; }
  Window window(int32_t rank) const { return windows_[static_cast<size_t>(rank)]; }
  bool connected() const { return !windows_.empty(); }

  // max_blocks: thread blocks of a kernel of this communicator, at most; the same on all ranks. The host has one.
  // early_blocks: see cuda::DeviceEnd.
  void connect(const std::vector<std::string>& handles, int32_t max_blocks = 1, int32_t early_blocks = 0);

  // Over a checkpoint: see WindowMemory. Collective, with no op running; connect() follows resume().
  void suspend();
  std::string resume();

  // The mask of a step: the one passed, else the one kept (all ranks at first).
  RankMask active_ranks(const RankMask& passed) const;
  void set_active_ranks(const RankMask& mask);

  // Checks that do not need the op's tensors; throws ArgumentError.
  void check_ready(OpKind kind, Phase phase, int32_t ep_size, DeviceKind device, int32_t device_index) const;

  // State of the CPU column. One op at a time; a second thread is told so (two streams need two communicators).
  struct HostState {
    std::atomic<uint64_t> round{0};     // rounds begun on this communicator, dispatch and combine alike
    uint64_t last_round[3] = {0, 0, 0}; // by OpKind: the last round that used its memory
    std::vector<uint64_t> heard;        // [W] the last round for which the peer's flag was seen
    std::atomic<bool> busy{false};
    struct {
      uint64_t round = 0;  // 0: none
      OpKind kind{};
      RankMask mask;
      StepHeader header{};
    } started;  // between a start and its wait

    // Why the communicator cannot be used again, "" while it can. Any thread may ask.
    std::string failure() const {
      const std::lock_guard<std::mutex> lock(mutex);
      return failure_text;
    }
    void fail(const std::string& text) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure_text = text;
    }

   private:
    mutable std::mutex mutex;
    std::string failure_text;
  };
  HostState& host() { return host_; }

  // State of the CUDA column; null on the host.
  cuda::DeviceEnd* device_end() { return device_end_.get(); }

  // Both columns: rounds begun, and the sentence of the failure that the next op will raise, "" where there is none.
  uint64_t rounds() const;
  std::string failure() const;

  std::atomic<int64_t> delay_usec[kDelayPoints] = {};

 private:
  CommunicatorOptions options_;
  int options_forks_;  // a forked child must not take part in its parent's rounds
  Window::Offsets offsets_;
  std::unique_ptr<WindowMemory> memory_;
  std::vector<Window> windows_;  // by rank
  RankMask active_;
  HostState host_;
  std::unique_ptr<cuda::DeviceEnd> device_end_;
};

// The process-wide registry. Names are unique; close() of an unknown name is no error.
std::shared_ptr<Communicator> open(const CommunicatorOptions& options);
std::shared_ptr<Communicator> find(const std::string& name);  // ArgumentError when there is none
void close(const std::string& name);
std::vector<std::string> names();

}  // namespace moe_ep
