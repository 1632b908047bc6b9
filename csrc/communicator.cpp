#include "csrc/communicator.h"

#include <pthread.h>

#include <map>
#include <mutex>

#ifdef MOE_EP_CUDA
#include "csrc/cuda/launch.h"
#endif

namespace moe_ep {
namespace {

std::atomic<int> forks{0};

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Communicator>> by_name;
};

// Never destroyed: threads of the framework may still run ops while static destructors do.
Registry& registry() {
  static Registry* instance = new Registry;
  return *instance;
}

void require(bool ok, const std::string& text) {
  if (!ok) throw ArgumentError(text);
}

// How often this process and its ancestors have forked since the library was loaded.
const int forks_counted = [] { return pthread_atfork(nullptr, nullptr, [] { ++forks; }); }();

std::string got(int64_t value) { return ", got " + std::to_string(value); }

void check_shape(const CommunicatorOptions& o) {
  const WindowShape& s = o.shape;
  require(!o.name.empty(), "comm: expected a non-empty name");
  require(s.ep_size >= 1 && s.ep_size <= kMaxRanks,
          "ep_size: expected 1.." + std::to_string(kMaxRanks) + got(s.ep_size));
  require(o.rank >= 0 && o.rank < s.ep_size, "rank: expected 0.." + std::to_string(s.ep_size - 1) + got(o.rank));
  require(s.max_tokens >= 1 && s.max_tokens <= kMaxTokens,
          "max_tokens_per_rank: expected 1.." + std::to_string(kMaxTokens) + got(s.max_tokens));
  require(s.max_top_k >= 1 && s.max_top_k <= kMaxTopK,
          "top_k: expected 1.." + std::to_string(kMaxTopK) + got(s.max_top_k));
  require(s.eplb_experts >= 0, "eplb_stats_num_experts: expected at least 0" + got(s.eplb_experts));
  require(s.lamport_tokens >= 0 && s.lamport_tokens <= s.max_tokens,
          "lamport_tokens: expected 0..max_tokens_per_rank = " + std::to_string(s.max_tokens) + got(s.lamport_tokens));
  require(s.lamport_tokens == 0 || (s.ep_size <= kLamportMaxRanks && s.lamport_choice_vectors() <= 32),
          "lamport_tokens: the Lamport transport takes at most " + std::to_string(kLamportMaxRanks) +
              " ranks, and ids and weights of 384 bytes per token");
  const auto check_counted = [&](const char* name, int32_t tokens) {
    require(tokens >= 0 && tokens <= s.max_tokens,
            std::string(name) + ": expected 0..max_tokens_per_rank = " + std::to_string(s.max_tokens) + got(tokens));
  };
  check_counted("counted_tokens", s.counted_tokens);
  check_counted("counted_combine_tokens", s.counted_combine_tokens);
  require(!s.counts() || o.device == DeviceKind::kCuda, "counted_tokens: only GPUs have counted writes");
  require(s.counts() == (o.counted != CountedPuts::kNone), "counted: expected none without counted_tokens only");
  require(s.weight_itemsize >= 1, "weight_itemsize: expected at least 1" + got(s.weight_itemsize));
  const auto check_row = [](const char* name, int64_t bytes) {
    require(bytes >= 0 && bytes % 16 == 0, std::string(name) + ": expected a multiple of 16" + got(bytes));
  };
  check_row("dispatch_row_bytes", s.dispatch_row_bytes);
  check_row("combine_row_bytes", s.combine_row_bytes);
  // The walk of the window counts in 64 bits.
  const double rows =
      static_cast<double>(s.dispatch_row_bytes) + s.max_targets() * static_cast<double>(s.combine_row_bytes);
  require(rows * s.max_tokens < 0x1p62,
          "hidden_size: the window would have 2^62 bytes or more; lower it or max_tokens_per_rank");
}

std::unique_ptr<WindowMemory> make_memory(const CommunicatorOptions& o, int64_t window_bytes) {
  const auto bytes = static_cast<size_t>(window_bytes);
  if (o.device == DeviceKind::kCpu) return make_shm_memory(bytes);
#ifdef MOE_EP_CUDA
  if (o.counted == CountedPuts::kFabric) {
    require(cuda::compiled_with_counted_writes(),
            "counted: this build has no fabric writes; build with CUDA 13.4 or newer");
    require(o.memory == "fabric", "memory: expected fabric where counted is fabric, got " + o.memory);
    return make_endpoint_memory(bytes, o.device_index, o.rank, o.shape.ep_size);
  }
  if (o.memory == "fabric" || o.memory == "posix_fd") {
    return make_vmm_memory(bytes, o.device_index, o.memory == "fabric");
  }
  require(o.memory == "cuda_ipc", "memory: expected fabric, posix_fd or cuda_ipc, got " + o.memory);
  return make_ipc_memory(bytes, o.device_index);
#else
  throw ArgumentError("device: this build of torch_moe_ep has no CUDA column; install nvcc and build again");
#endif
}

}  // namespace

#ifndef MOE_EP_CUDA
// Never made in a build without the CUDA column.
class cuda::DeviceEnd {};
#endif

Communicator::~Communicator() = default;

Communicator::Communicator(const CommunicatorOptions& options) : options_(options), options_forks_(forks) {
  check_shape(options_);
#ifdef MOE_EP_CUDA
  if (options_.device == DeviceKind::kCuda) options_.shape.flag_blocks = cuda::kMaxBlocks;
#endif
  offsets_ = Window::walk(options_.shape);
  memory_ = make_memory(options_, offsets_.bytes);
#ifdef MOE_EP_CUDA
  if (options_.device == DeviceKind::kCuda) {
    device_end_ = std::make_unique<cuda::DeviceEnd>(options_.device_index, options_.shape);
    device_end_->pdl = options_.pdl;
  }
#endif
  host_.heard.assign(static_cast<size_t>(ep_size()), 0);
  for (int32_t r = 0; r < ep_size(); ++r) active_.words[r / 64] |= uint64_t{1} << (r % 64);
}

void Communicator::connect(const std::vector<std::string>& handles, int32_t max_blocks, int32_t early_blocks) {
  require(static_cast<int32_t>(handles.size()) == ep_size(),
          "handles: expected one per rank, " + std::to_string(ep_size()) + got(static_cast<int64_t>(handles.size())));
  memory_->connect(rank(), handles);
  windows_.clear();
  for (char* base : memory_->bases()) windows_.push_back(Window{base});
#ifdef MOE_EP_CUDA
  if (device_end_ != nullptr) {
    require(max_blocks >= 1 && max_blocks <= cuda::kMaxBlocks,
            "max_blocks: expected 1.." + std::to_string(cuda::kMaxBlocks) + got(max_blocks));
    device_end_->max_blocks = max_blocks;
    device_end_->early_blocks = early_blocks;
    device_end_->connect(memory_->bases(), memory_->endpoints());
  }
#endif
}

void Communicator::suspend() {
  memory_->suspend();
  windows_.clear();
}

std::string Communicator::resume() {
  memory_->resume();
  return memory_->handle();
}

uint64_t Communicator::rounds() const {
#ifdef MOE_EP_CUDA
  if (device_end_ != nullptr) return device_end_->rounds();
#endif
  return host_.round;
}

std::string Communicator::failure() const {
#ifdef MOE_EP_CUDA
  if (device_end_ != nullptr) return device_end_->failure_text(*this);
#endif
  return host_.failure();
}

RankMask Communicator::active_ranks(const RankMask& passed) const { return passed.given ? passed : active_; }

void Communicator::set_active_ranks(const RankMask& mask) {
  require(options_.enable_rank_mask, "active ranks: communicator '" + name() + "' was made without enable_rank_mask");
  active_ = mask;
#ifdef MOE_EP_CUDA
  if (device_end_ != nullptr) device_end_->set_active(mask);
#endif
}

void Communicator::check_ready(OpKind kind, Phase phase, int32_t ep_size_arg, DeviceKind device,
                               int32_t device_index) const {
  const std::string where = std::string(op_name(kind, phase)) + ": communicator '" + name() + "' ";
  require(forks == options_forks_, where + "was created before a fork; a forked process must create its own");
  require(connected(), where + "is not connected; finish its construction (or checkpoint_restore) on every rank first");
  require(ep_size() == ep_size_arg, where + "has ep_size " + std::to_string(ep_size()) +
                                        ", this call (or the graph it was traced into) was made for " +
                                        std::to_string(ep_size_arg) + "; trace again or open one of that size");
  require(options_.device == device && (device == DeviceKind::kCpu || options_.device_index == device_index),
          where + "lives on another device than the tensors passed");
}

std::shared_ptr<Communicator> open(const CommunicatorOptions& options) {
  auto comm = std::make_shared<Communicator>(options);
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  require(r.by_name.emplace(options.name, comm).second, "comm: a communicator named '" + options.name + "' is open");
  return comm;
}

std::shared_ptr<Communicator> find(const std::string& name) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  const auto it = r.by_name.find(name);
  if (it != r.by_name.end()) return it->second;
  std::string open_names;
  for (const auto& entry : r.by_name) open_names += (open_names.empty() ? "" : ", ") + entry.first;
  throw ArgumentError("comm: no communicator named '" + name + "' is open in this process (open: " +
                      (open_names.empty() ? "none" : open_names) + "); it was closed, or never created here");
}

void close(const std::string& name) {
  std::shared_ptr<Communicator> last;  // destroyed outside the lock
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  const auto it = r.by_name.find(name);
  if (it == r.by_name.end()) return;
  last = std::move(it->second);
  r.by_name.erase(it);
}

std::vector<std::string> names() {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  std::vector<std::string> out;
  for (const auto& entry : r.by_name) out.push_back(entry.first);
  return out;
}

}  // namespace moe_ep
