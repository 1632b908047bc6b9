// The installed driver's calls for csrc/memory/logical_endpoint.h, looked up at run time: the library loads beside old
// drivers, and without one.
#include <cuda_runtime.h>

#include <algorithm>

#include "csrc/memory/logical_endpoint.h"

namespace moe_ep::endpoint {

Driver installed_driver() {
  // Asked for no more than the driver has, an old one still gives the calls that it knows.
  int version = 0;
  cudaDriverGetVersion(&version);
  const auto asked = static_cast<unsigned>(std::min(version, static_cast<int>(kToolkit)));
  return Driver::load([asked](const char* name) -> void* {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion(name, &entry, asked, cudaEnableDefault, &found);
    if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) return entry;
    cudaGetLastError();
    return nullptr;
  });
}

}  // namespace moe_ep::endpoint
