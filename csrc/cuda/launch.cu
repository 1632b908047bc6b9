#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "csrc/cuda/launch.cuh"
#include "csrc/cuda/put_counted.cuh"
#include "csrc/memory/cuda_peer.h"
#include "csrc/transport/fence.h"

namespace moe_ep::cuda {
namespace {

using cuda_memory::check_runtime;
using cuda_memory::OnDevice;

size_t sent_bytes(const WindowShape& shape) {
  return sizeof(unsigned long long) * static_cast<size_t>(shape.ep_size) * kCountedBlocks;
}

}  // namespace

int64_t alignment_of(std::initializer_list<int64_t> values) {
  int64_t all = 16;
  for (const int64_t value : values) all |= value;
  return all & -all;
}

void launch(const void* kernel, int blocks, int threads, void* params, bool pdl, void* stream, const char* name,
            int32_t shared_bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  void* arguments[] = {params};
  check_runtime(cudaLaunchKernelExC(&config, kernel, arguments), name);
}

bool compiled_with_counted_writes() { return MOE_EP_COUNTED != 0; }

int32_t resident_blocks(int32_t device_index, CountedPuts counted) {
  const OnDevice on(device_index);
  int sms = 0, per_sm = kMaxBlocks;
  check_runtime(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device_index), "cudaDeviceGetAttribute");
  // Also loads the kernels, so that their first launch may be inside a capture or beside a spinning one.
  const auto look_at = [&](const std::vector<const void*>& kernels, int32_t shared_bytes) {
    for (const void* kernel : kernels) {
      if (shared_bytes > 0) {
        check_runtime(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
                      "cudaFuncSetAttribute of the shared memory");
      }
      int blocks = 0;
      check_runtime(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared_bytes),
                    "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
      per_sm = std::min(per_sm, blocks);
    }
  };
  for (const auto& kernels : {dispatch_kernels(), combine_kernels(), dispatch_phase_kernels(), combine_phase_kernels(),
                              lamport_dispatch_kernels(), lamport_combine_kernels()}) {
    look_at(kernels, 0);
  }
  if (counted != CountedPuts::kNone) {
    look_at(counted_dispatch_kernels(counted), kSlicesBytes);
    look_at(counted_combine_kernels(counted), kSlicesBytes);
  }
  for (const auto& kernels : {dispatch_alone_kernels(), combine_alone_kernels(), start_alone_kernels()}) {
    for (const void* kernel : kernels) {
      cudaFuncAttributes attributes{};
      check_runtime(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
    }
  }
  return std::max(1, per_sm) * sms;
}

DeviceEnd::DeviceEnd(int32_t device_index, const WindowShape& shape) : device_index_(device_index), shape_(shape) {
  const OnDevice on(device_index);
  try {
    check_runtime(cudaMalloc(&windows_, sizeof(char*) * kMaxRanks), "cudaMalloc of the window table");
    check_runtime(cudaMalloc(&state_, sizeof(DeviceState)), "cudaMalloc of the communicator's state");
    if (shape.counts()) {
      const size_t bytes = sent_bytes(shape);
      check_runtime(cudaMalloc(&sent_, bytes), "cudaMalloc of the counts of bytes put");
      check_runtime(cudaMalloc(&endpoints_, sizeof(uint32_t) * kMaxRanks), "cudaMalloc of the endpoint table");
    }
    DeviceState state{};
    for (int32_t r = 0; r < shape.ep_size; ++r) state.active[r / 64] |= 1ull << (r % 64);
    check_runtime(cudaMemcpy(state_, &state, sizeof state, cudaMemcpyHostToDevice),
                  "cudaMemcpy of the communicator's state");
    void* page = mmap(nullptr, sizeof(PostMortem), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw Error("mmap of the post-mortem record failed");
    post_mortem_ = static_cast<PostMortem*>(page);
    check_runtime(cudaHostRegister(page, 4096, cudaHostRegisterMapped), "cudaHostRegister of the post-mortem record");
    check_runtime(cudaHostGetDevicePointer(reinterpret_cast<void**>(&post_mortem_device_), page, 0),
                  "cudaHostGetDevicePointer of the post-mortem record");
  } catch (...) {
    release();
    throw;
  }
}

DeviceEnd::~DeviceEnd() { release(); }

void DeviceEnd::release() {
  // No check: after a trap every call fails, and the memory goes with the context.
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_index_);
  if (windows_ != nullptr) cudaFree(windows_);
  if (state_ != nullptr) cudaFree(state_);
  if (sent_ != nullptr) cudaFree(sent_);
  if (endpoints_ != nullptr) cudaFree(endpoints_);
  if (post_mortem_ != nullptr) {
    cudaHostUnregister(post_mortem_);
    munmap(post_mortem_, sizeof(PostMortem));
  }
  windows_ = nullptr;
  sent_ = nullptr;
  endpoints_ = nullptr;
  state_ = nullptr;
  post_mortem_ = nullptr;
  cudaSetDevice(before);
  cudaGetLastError();
}

void DeviceEnd::connect(const std::vector<char*>& windows, const std::vector<uint32_t>& endpoints) {
  const OnDevice on(device_index_);
  if (sent_ != nullptr) {
    check_runtime(cudaMemset(sent_, 0, sent_bytes(shape_)), "cudaMemset of the counts of bytes put");
  }
  if (!endpoints.empty()) {
    check_runtime(cudaMemcpy(endpoints_, endpoints.data(), sizeof(uint32_t) * endpoints.size(), cudaMemcpyHostToDevice),
                  "cudaMemcpy of the endpoint table");
  }
  check_runtime(cudaMemcpy(windows_, windows.data(), sizeof(char*) * windows.size(), cudaMemcpyHostToDevice),
                "cudaMemcpy of the window table");
}

void DeviceEnd::set_active(const RankMask& mask) {
  const OnDevice on(device_index_);
  check_runtime(cudaMemcpy(state_->active, mask.words, sizeof mask.words, cudaMemcpyHostToDevice),
                "cudaMemcpy of the active ranks");
}

uint64_t DeviceEnd::rounds() const {
  if (post_mortem_->what != PostMortem::kNothing) return static_cast<uint64_t>(post_mortem_->round);
  const OnDevice on(device_index_);
  unsigned long long ticket = 0;
  check_runtime(cudaMemcpy(&ticket, &state_->ticket, sizeof ticket, cudaMemcpyDeviceToHost), "cudaMemcpy of the round");
  return (ticket + (1ull << 15)) >> 16;  // a started one counts
}

DeviceComm DeviceEnd::comm(const Communicator& owner, int64_t timeout_sec) const {
  DeviceComm c{};
  c.windows = windows_;
  c.own_window = owner.window(owner.rank()).base;
  c.state = state_;
  c.post_mortem = post_mortem_device_;
  c.sent = sent_;
  c.endpoints = endpoints_;
  c.shape = owner.shape();
  c.offsets = owner.offsets();
  c.rank = owner.rank();
  c.ep_size = owner.ep_size();
  constexpr int64_t kNominalHz = 2'000'000'000;
  c.timeout_sec = timeout_sec;
  c.timeout_cycles = timeout_sec > INT64_MAX / kNominalHz ? INT64_MAX : timeout_sec * kNominalHz;
  for (int i = 0; i < kDelayPoints; ++i) c.delay_cycles[i] = owner.delay_usec[i].load() * (kNominalHz / 1'000'000);
  return c;
}

Plan DeviceEnd::plan(int32_t tokens_per_rank, int64_t row_bytes, int32_t blocks) const {
  const int32_t most = std::min(max_blocks, blocks);
  if (forced.piece_bytes != 0) {
    Plan p = forced;
    p.pieces = static_cast<int32_t>(std::min<int64_t>({p.pieces, blocks, std::max<int64_t>(1, row_bytes / 128)}));
    p.groups = std::min(p.groups, blocks / p.pieces);
    p.piece_bytes = round_up((row_bytes + p.pieces - 1) / p.pieces, 128);
    return p;
  }
  // Measured on an H200 (benchmarks/NOTES.md): pieces of 2 KiB in small steps, where every thread then has one load;
  // two pieces of a row where tokens are many, one where they fill the blocks by themselves. A rank without peers has
  // its own grid, and takes what was written last first: the cache still holds it.
  Plan p;
  const int64_t tokens = std::max(1, tokens_per_rank);
  int64_t pieces = tokens * shape_.ep_size <= 64 ? row_bytes / 2048 : tokens * 2 >= most * 3 ? 1 : 2;
  pieces = std::clamp<int64_t>(pieces, 1, std::max<int64_t>(1, std::min<int64_t>(most, row_bytes / 512)));
  p.pieces = static_cast<int32_t>(pieces);
  p.groups = static_cast<int32_t>(std::min<int64_t>(tokens, most / pieces));
  p.piece_bytes = round_up((row_bytes + pieces - 1) / pieces, 128);
  p.descending = shape_.ep_size == 1;
  return p;
}

std::string DeviceEnd::failure_text(const Communicator& owner) const {
  const PostMortem& r = *post_mortem_;
  const auto kind = static_cast<OpKind>(r.op);
  const auto round = static_cast<uint64_t>(r.round);
  switch (*const_cast<const volatile int32_t*>(&r.what)) {
    case PostMortem::kNothing: return "";
    case PostMortem::kDisagree: return disagreement_text(owner, kind, round, r.peer, r.field, r.mine, r.theirs);
    case PostMortem::kMisused: return misuse_text(owner, kind, static_cast<Phase>(r.peer), r.field, round, r.mine);
    case PostMortem::kNoFlag: return timeout_text(owner, kind, round, r.peer, "flag", r.timeout_sec);
    case PostMortem::kNoHeader: return timeout_text(owner, kind, round, r.peer, "header", r.timeout_sec);
    case PostMortem::kNotPut:
      return timeout_text(owner, kind, round, r.peer, "completion of its own puts", r.timeout_sec);
    case PostMortem::kPutFailed:
      return std::string(op_name(kind)) + ": communicator '" + owner.name() + "': round " + std::to_string(round) +
             ": the fabric reported that a counted write of rank " + std::to_string(r.peer) +
             " failed; look at the links (nvidia-smi nvlink), or create the communicator with cft=False";
    case PostMortem::kNoRows: return timeout_text(owner, kind, round, r.peer, "rows", r.timeout_sec);
    default:
      return timeout_text(owner, kind, round, r.peer, std::string("completion of its earlier ") + op_name(kind),
                          r.timeout_sec);
  }
}

void DeviceEnd::raise_failure(const Communicator& owner, OpKind next) {
  const std::string text = failure_text(owner);
  if (text.empty()) return;
  if (post_mortem_->what != PostMortem::kDisagree && post_mortem_->what != PostMortem::kMisused) {
    throw TimeoutError(unusable_text(owner, next, text));
  }
  const OnDevice on(device_index_);
  *post_mortem_ = PostMortem{};
  check_runtime(cudaMemset(&state_->failed, 0, sizeof state_->failed), "cudaMemset of the failure word");
  throw Error(text);
}

}  // namespace moe_ep::cuda
