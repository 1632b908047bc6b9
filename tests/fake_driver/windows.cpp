// csrc/memory/cuda_vmm.cpp as functions of C, over a CUDA runtime whose driver is loaded from a file. It has what that
// source calls, and one device.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "csrc/memory/memory.h"

using moe_ep::WindowMemory;

namespace {

void* library = nullptr;
std::string text;  // of the last error

// 0, or 1 for an Error and 2 for an ArgumentError, whose sentence is harness_text() then.
template <class Function>
int guarded(const Function& function) {
  try {
    function();
    return 0;
  } catch (const moe_ep::ArgumentError& error) {
    text = error.what();
    return 2;
  } catch (const moe_ep::Error& error) {
    text = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  return static_cast<cudaError_t>(reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"))(version));
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool is_new = std::string(name).find("LogicalEndpoint") != std::string::npos;
  *entry = is_new && version < 13040 ? nullptr : dlsym(library, name);
  *found = *entry != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the runtime"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

const char* harness_text() { return text.c_str(); }
bool windows_load(const char* path) {
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return library != nullptr;
}

// ep_size 0: without endpoints.
int windows_open(int64_t bytes, int32_t rank, int32_t ep_size, WindowMemory** made) {
  return guarded([&] {
    const auto size = static_cast<size_t>(bytes);
    *made =
        (ep_size > 0 ? moe_ep::make_endpoint_memory(size, 0, rank, ep_size) : moe_ep::make_vmm_memory(size, 0, true))
            .release();
  });
}
int windows_handle(const WindowMemory* window, char* out, int64_t* bytes) {
  return guarded([&] { *bytes = static_cast<int64_t>(window->handle().copy(out, 1024)); });
}
// The handles lie one after the other and are of one size.
int windows_connect(WindowMemory* window, int32_t rank, const char* handles, int64_t bytes, int32_t count) {
  return guarded([&] {
    std::vector<std::string> all;
    for (int32_t i = 0; i < count; ++i) all.emplace_back(handles + i * bytes, static_cast<size_t>(bytes));
    window->connect(rank, all);
  });
}
int windows_endpoints(const WindowMemory* window, uint32_t* out, int32_t* count) {
  return guarded([&] {
    const std::vector<uint32_t> ids = window->endpoints();
    std::copy(ids.begin(), ids.end(), out);
    *count = static_cast<int32_t>(ids.size());
  });
}
int windows_suspend(WindowMemory* window) {
  return guarded([&] { window->suspend(); });
}
int windows_resume(WindowMemory* window) {
  return guarded([&] { window->resume(); });
}
void windows_close(WindowMemory* window) { delete window; }

}  // extern "C"
