// Windows in GPU memory that the driver's virtual memory calls map (cuMemCreate, cuMemMap): their physical memory can
// be given back and replaced while every address stays, which is what keeps captured graphs alive over a checkpoint.
// Handles travel as fabric handles (any process of the NVLink domain) or as file descriptors (processes of one host,
// sent over a unix socket in the abstract namespace, which leaves no file behind). Windows with logical endpoints send
// the fabric handles of both.
#include <cuda.h>
#include <cuda_runtime.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "csrc/ep.h"
#include "csrc/memory/cuda_peer.h"
#include "csrc/memory/logical_endpoint.h"
#include "csrc/memory/memory.h"

namespace moe_ep {
namespace {

using cuda_memory::check_runtime;
using cuda_memory::PeerHandle;

template <class Function>
Function driver(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_runtime(cudaGetDriverEntryPointByVersion(name, &entry, 12040, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
    throw Error(std::string("the CUDA driver has no ") + name + "; a driver for CUDA 12.4 or newer is needed");
  }
  return reinterpret_cast<Function>(entry);
}
#define MOE_EP_DRIVER(function) driver<decltype(&function)>(#function)

void check_driver(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  const char* text = nullptr;
  MOE_EP_DRIVER(cuGetErrorString)(status, &text);
  throw Error(std::string(what) + " failed: " + (text != nullptr ? text : "unknown error"));
}

// One end of the exchange of file descriptors. Every rank listens before any rank learns its name, so that connect()
// and send never wait for a peer, and accept() waits for its peers' sends alone.
class DescriptorExchange {
 public:
  DescriptorExchange() {
    listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener_ < 0) fail("socket");
    sockaddr_un address = address_of("");
    // Autobind: the kernel picks a free abstract name.
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0) fail("bind");
    if (listen(listener_, kMaxRanks) != 0) fail("listen");
    socklen_t length = sizeof address;
    if (getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0) fail("getsockname");
    name_.assign(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
  }
  ~DescriptorExchange() {
    if (listener_ >= 0) ::close(listener_);
  }
  const std::string& name() const { return name_; }

  void send(const std::string& name, int32_t rank, int descriptor) const {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) fail("socket");
    const sockaddr_un address = address_of(name);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    iovec data{&rank, sizeof rank};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    const bool sent = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 &&
                      sendmsg(fd, &message, 0) == static_cast<ssize_t>(sizeof rank);
    ::close(fd);
    if (!sent) fail("sending a window's file descriptor over a unix socket");
  }

  // The rank that sent, and its descriptor, which the caller closes.
  std::pair<int32_t, int> receive() const {
    pollfd waiting{listener_, POLLIN, 0};
    if (poll(&waiting, 1, 60'000) <= 0) fail("waiting 60 s for a peer's file descriptor");
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) fail("accept");
    int32_t rank = -1;
    iovec data{&rank, sizeof rank};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    ::close(fd);
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (got != static_cast<ssize_t>(sizeof rank) || header == nullptr || header->cmsg_type != SCM_RIGHTS) {
      fail("receiving a window's file descriptor");
    }
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    return {rank, descriptor};
  }

 private:
  static sockaddr_un address_of(const std::string& name) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    return address;
  }
  [[noreturn]] static void fail(const char* what) {
    throw Error(std::string(what) + " failed: " + std::strerror(errno) +
                "; ranks must share a host and its network namespace, or use another kind of memory");
  }

  int listener_ = -1;
  std::string name_;
};

class VmmMemory final : public WindowMemory {
 public:
  // ep_size: of the endpoints; 0 = the windows have none.
  VmmMemory(size_t bytes, int32_t device, bool fabric, int32_t rank = 0, int32_t ep_size = 0)
      : device_(device), fabric_(fabric) {
    const cuda_memory::OnDevice on(device);
    check_runtime(cudaFree(nullptr), "creating the CUDA context");
    location_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location_.location.id = device;
    location_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    location_.requestedHandleTypes = fabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t granularity = 0;
    check_driver(
        MOE_EP_DRIVER(cuMemGetAllocationGranularity)(&granularity, &location_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
    endpoint::Driver endpoint_driver;
    endpoint::EndpointsOptions options;
    size_t least = bytes;
    if (ep_size > 0) {
      const std::string occupied = endpoint::Endpoints::occupied();
      if (!occupied.empty()) throw Error(occupied);
      endpoint_driver = endpoint::installed_driver();
      options.device_index = device;
      options.rank = rank;
      options.ep_size = ep_size;
      options.window_bytes = static_cast<int64_t>(bytes);
      least = static_cast<size_t>(endpoint::endpoint_bytes(endpoint_driver, device, options.window_bytes));
    }
    bytes_ = (least + granularity - 1) / granularity * granularity;
    options.physical_bytes = static_cast<int64_t>(bytes_);
    if (!fabric) exchange_ = std::make_unique<DescriptorExchange>();
    try {
      own_ = reserve();
      allocate();
      if (ep_size > 0) {
        endpoints_ = std::make_unique<endpoint::Endpoints>(endpoint_driver, options, own_physical_);
      }
    } catch (...) {
      release();
      throw;
    }
  }
  ~VmmMemory() override { release(); }

  const char* kind() const override { return fabric_ ? "fabric" : "posix_fd"; }

  std::string handle() const override {
    PeerHandle h(own_, bytes_, device_);
    if (fabric_) {
      check_driver(MOE_EP_DRIVER(cuMemExportToShareableHandle)(h.payload, own_physical_, CU_MEM_HANDLE_TYPE_FABRIC, 0),
                   "exporting a fabric handle");
      if (endpoints_ != nullptr) endpoints_->handle().copy(h.payload + kEndpointAt, sizeof(endpoint::FabricHandle));
    } else {
      h.set_text(exchange_->name());
    }
    return h.packed();
  }

  void connect(int rank, const std::vector<std::string>& handles) override {
    const cuda_memory::OnDevice on(device_);
    bases_.resize(handles.size(), nullptr);
    reserved_.resize(handles.size(), 0);
    mapped_.resize(handles.size(), 0);
    int32_t expected = 0;
    for (size_t peer = 0; peer < handles.size(); ++peer) {
      const PeerHandle h = PeerHandle::unpack(handles[peer], bytes_, static_cast<int>(peer));
      if (static_cast<int>(peer) == rank || h.in_this_process()) {
        bases_[peer] = h.address;
        if (static_cast<int>(peer) == rank) bases_[peer] = own_;
      } else if (fabric_) {
        CUmemGenericAllocationHandle physical = 0;
        check_driver(MOE_EP_DRIVER(cuMemImportFromShareableHandle)(&physical, const_cast<char*>(h.payload),
                                                                   CU_MEM_HANDLE_TYPE_FABRIC),
                     "importing a fabric handle");
        map_peer(peer, physical);
      } else {
        send_to(h.text(), rank);
        ++expected;
      }
    }
    for (; expected > 0; --expected) {
      const auto [peer, descriptor] = exchange_->receive();
      CUmemGenericAllocationHandle physical = 0;
      const CUresult status = MOE_EP_DRIVER(cuMemImportFromShareableHandle)(
          &physical, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
      ::close(descriptor);
      check_driver(status, "importing a peer's file descriptor");
      map_peer(static_cast<size_t>(peer), physical);
    }
    if (endpoints_ == nullptr) return;
    std::vector<std::string> of_endpoints;
    for (const std::string& handle : handles) {
      of_endpoints.push_back(
          handle.substr(offsetof(PeerHandle, payload) + kEndpointAt, sizeof(endpoint::FabricHandle)));
    }
    endpoints_->connect(of_endpoints);
  }

  void seal() override {}
  const std::vector<char*>& bases() const override { return bases_; }
  std::vector<uint32_t> endpoints() const override {
    return endpoints_ == nullptr ? std::vector<uint32_t>() : endpoints_->ids();
  }

  void suspend() override {
    const cuda_memory::OnDevice on(device_);
    check_runtime(cudaDeviceSynchronize(), "waiting for the device before its windows are unmapped");
    for (size_t peer = 0; peer < mapped_.size(); ++peer) {
      if (mapped_[peer]) MOE_EP_DRIVER(cuMemUnmap)(as_pointer(bases_[peer]), bytes_);
      mapped_[peer] = 0;
    }
    if (endpoints_ != nullptr) endpoints_->suspend();
    free_physical();
  }
  void resume() override {
    const cuda_memory::OnDevice on(device_);
    try {
      allocate();
      if (endpoints_ != nullptr) endpoints_->resume(own_physical_);
    } catch (...) {
      free_physical();
      throw;
    }
  }

 private:
  // Where the endpoint's handle lies in PeerHandle::payload.
  static constexpr size_t kEndpointAt = sizeof(CUmemFabricHandle);
  static_assert(kEndpointAt + sizeof(endpoint::FabricHandle) <= sizeof(PeerHandle::payload));

  static CUdeviceptr as_pointer(char* address) { return reinterpret_cast<CUdeviceptr>(address); }

  char* reserve() const {
    CUdeviceptr address = 0;
    check_driver(MOE_EP_DRIVER(cuMemAddressReserve)(&address, bytes_, 0, 0, 0), "cuMemAddressReserve");
    return reinterpret_cast<char*>(address);
  }

  // Physical memory behind the own address, zero-filled.
  void allocate() {
    const CUresult status = MOE_EP_DRIVER(cuMemCreate)(&own_physical_, bytes_, &location_, 0);
    if (status != CUDA_SUCCESS) {
      own_physical_ = 0;
      check_driver(status, ("allocating a window of " + std::to_string(bytes_) + " bytes as " + kind()).c_str());
    }
    check_driver(MOE_EP_DRIVER(cuMemMap)(as_pointer(own_), bytes_, 0, own_physical_, 0), "cuMemMap");
    own_mapped_ = true;
    // Ranks of this process on other devices reach the window by the same address.
    int devices = 0;
    check_runtime(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    for (int d = 0; d < devices; ++d) {
      int reaches = d == device_;
      if (d != device_) cudaDeviceCanAccessPeer(&reaches, d, device_);
      if (reaches) allow(own_, d);
    }
    check_runtime(cudaMemset(own_, 0, bytes_), "zeroing a window");
    check_runtime(cudaStreamSynchronize(nullptr), "zeroing a window");
  }

  void allow(char* address, int device) const {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check_driver(MOE_EP_DRIVER(cuMemSetAccess)(as_pointer(address), bytes_, &access, 1), "cuMemSetAccess");
  }

  // Takes the imported handle over: the mapping keeps the memory alive.
  void map_peer(size_t peer, CUmemGenericAllocationHandle physical) {
    try {
      if (peer >= bases_.size()) throw Error("a window came from rank " + std::to_string(peer) + ", which is none");
      if (bases_[peer] == nullptr) {
        bases_[peer] = reserve();
        reserved_[peer] = 1;
      }
      check_driver(MOE_EP_DRIVER(cuMemMap)(as_pointer(bases_[peer]), bytes_, 0, physical, 0), "cuMemMap");
      mapped_[peer] = 1;
      allow(bases_[peer], device_);
    } catch (...) {
      MOE_EP_DRIVER(cuMemRelease)(physical);
      throw;
    }
    MOE_EP_DRIVER(cuMemRelease)(physical);
  }

  void send_to(const std::string& name, int32_t rank) const {
    int descriptor = -1;
    check_driver(MOE_EP_DRIVER(cuMemExportToShareableHandle)(&descriptor, own_physical_,
                                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 "exporting a file descriptor");
    try {
      exchange_->send(name, rank, descriptor);
    } catch (...) {
      ::close(descriptor);
      throw;
    }
    ::close(descriptor);
  }

  void free_physical() {
    if (own_mapped_) MOE_EP_DRIVER(cuMemUnmap)(as_pointer(own_), bytes_);
    own_mapped_ = false;
    if (own_physical_ != 0) MOE_EP_DRIVER(cuMemRelease)(own_physical_);
    own_physical_ = 0;
  }

  void release() {
    try {
      const cuda_memory::OnDevice on(device_);
      for (size_t peer = 0; peer < mapped_.size(); ++peer) {
        if (mapped_[peer]) MOE_EP_DRIVER(cuMemUnmap)(as_pointer(bases_[peer]), bytes_);
        if (reserved_[peer]) MOE_EP_DRIVER(cuMemAddressFree)(as_pointer(bases_[peer]), bytes_);
      }
      endpoints_.reset();
      free_physical();
      if (own_ != nullptr) MOE_EP_DRIVER(cuMemAddressFree)(as_pointer(own_), bytes_);
    } catch (const Error&) {
      // The context is gone (a trap, or the process ends), and the memory with it.
    }
    bases_.clear();
    reserved_.clear();
    mapped_.clear();
    own_ = nullptr;
  }

  size_t bytes_ = 0;
  int32_t device_;
  bool fabric_;
  CUmemAllocationProp location_{};
  CUmemGenericAllocationHandle own_physical_ = 0;
  bool own_mapped_ = false;
  char* own_ = nullptr;
  std::vector<char*> bases_;
  std::vector<char> reserved_;  // 1 = bases_[peer] was reserved by this object
  std::vector<char> mapped_;  // 1 = a peer's window is mapped at bases_[peer] by this object
  std::unique_ptr<DescriptorExchange> exchange_;
  std::unique_ptr<endpoint::Endpoints> endpoints_;  // bound to own_physical_ while that is there
};

}  // namespace

std::unique_ptr<WindowMemory> make_vmm_memory(size_t bytes, int32_t device, bool fabric) {
  return std::make_unique<VmmMemory>(bytes, device, fabric);
}

std::unique_ptr<WindowMemory> make_endpoint_memory(size_t bytes, int32_t device, int32_t rank, int32_t ep_size) {
  return std::make_unique<VmmMemory>(bytes, device, true, rank, ep_size);
}

}  // namespace moe_ep
