// Windows from cudaMalloc whose handles travel as cudaIpc handles: for hosts where neither fabric handles nor file
// descriptors can be exchanged. Their addresses do not survive a checkpoint.
#include <cuda_runtime.h>

#include "csrc/memory/cuda_peer.h"
#include "csrc/memory/memory.h"

namespace moe_ep {
namespace {

using cuda_memory::check_runtime;
using cuda_memory::OnDevice;
using cuda_memory::PeerHandle;

class IpcMemory final : public WindowMemory {
 public:
  IpcMemory(size_t bytes, int32_t device) : bytes_(bytes), device_(device) {
    const OnDevice on(device);
    check_runtime(cudaMalloc(&own_, bytes), ("allocating a window of " + std::to_string(bytes) + " bytes").c_str());
    try {
      check_runtime(cudaMemset(own_, 0, bytes), "zeroing a window");
      check_runtime(cudaStreamSynchronize(nullptr), "zeroing a window");
    } catch (...) {
      release();
      throw;
    }
  }
  ~IpcMemory() override { release(); }

  const char* kind() const override { return "cuda_ipc"; }

  std::string handle() const override {
    const OnDevice on(device_);
    PeerHandle h(own_, bytes_, device_);
    cudaIpcMemHandle_t ipc{};
    check_runtime(cudaIpcGetMemHandle(&ipc, own_), "cudaIpcGetMemHandle");
    std::memcpy(h.payload, &ipc, sizeof ipc);
    return h.packed();
  }

  void connect(int rank, const std::vector<std::string>& handles) override {
    const OnDevice on(device_);
    bases_.assign(handles.size(), nullptr);
    opened_.assign(handles.size(), 0);
    for (size_t peer = 0; peer < handles.size(); ++peer) {
      const PeerHandle h = PeerHandle::unpack(handles[peer], bytes_, static_cast<int>(peer));
      if (static_cast<int>(peer) == rank) {
        bases_[peer] = own_;
      } else if (h.in_this_process()) {
        if (h.device != device_) {
          const cudaError_t status = cudaDeviceEnablePeerAccess(h.device, 0);
          if (status != cudaErrorPeerAccessAlreadyEnabled) check_runtime(status, "cudaDeviceEnablePeerAccess");
          cudaGetLastError();
        }
        bases_[peer] = h.address;
      } else {
        cudaIpcMemHandle_t ipc{};
        std::memcpy(&ipc, h.payload, sizeof ipc);
        void* address = nullptr;
        check_runtime(cudaIpcOpenMemHandle(&address, ipc, cudaIpcMemLazyEnablePeerAccess),
                      ("opening the window of rank " + std::to_string(peer)).c_str());
        bases_[peer] = static_cast<char*>(address);
        opened_[peer] = 1;
      }
    }
  }

  void seal() override {}
  const std::vector<char*>& bases() const override { return bases_; }

 private:
  void release() {
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device_);
    for (size_t peer = 0; peer < opened_.size(); ++peer) {
      if (opened_[peer]) cudaIpcCloseMemHandle(bases_[peer]);
    }
    if (own_ != nullptr) cudaFree(own_);
    own_ = nullptr;
    bases_.clear();
    opened_.clear();
    cudaSetDevice(before);
    cudaGetLastError();
  }

  size_t bytes_;
  int32_t device_;
  char* own_ = nullptr;
  std::vector<char*> bases_;
  std::vector<char> opened_;
};

}  // namespace

std::unique_ptr<WindowMemory> make_ipc_memory(size_t bytes, int32_t device) {
  return std::make_unique<IpcMemory>(bytes, device);
}

}  // namespace moe_ep
