// Logical endpoints: the names by which counted writes reach a window. Every rank creates one over its own window and
// imports its peers', so that id `ids()[peer]` and an offset name a byte of the peer's window.
//
// The driver's calls are declared here and not taken from cuda.h, so that this room is in every build and its tests
// need no GPU; cuda_endpoint_abi.cpp compares the declarations with cuda.h where that is new enough.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/ep.h"

namespace moe_ep::endpoint {

// As in cuda.h of CUDA 13.4.
constexpr int32_t kToolkit = 13040;  // CUDA_VERSION that has all of it
constexpr int32_t kCapabilityMajor = 75;
constexpr int32_t kCapabilityMinor = 76;
constexpr int32_t kUnicastSupported = 153;
constexpr int32_t kCountedOpsSupported = 155;
constexpr int32_t kOwnerAccessSupported = 156;
constexpr int32_t kSupportedHandleTypes = 158;
constexpr int32_t kUnicast = 1;
constexpr int32_t kFabric = 1;       // as a handle type and as a bit of a mask of them
constexpr uint32_t kCountedOps = 1;  // flag
constexpr int32_t kUnicastClique = 2;
constexpr int32_t kIllegalState = 401;  // results that tell a remedy
constexpr int32_t kNotPermitted = 800;
constexpr int32_t kSystemNotReady = 802;

struct Properties {
  int32_t type = kUnicast;
  int32_t device = 0;
  uint64_t size = 0;
  uint32_t handle_types = kFabric;
  uint32_t flags = kCountedOps;
};
struct FabricHandle {
  unsigned char data[64];
};
struct Clique {
  int32_t type;
  uint32_t id;
};

// X(name, parameters) for every call; all return a CUresult.
#define MOE_EP_ENDPOINT_CALLS(X)                                                                                       \
  X(cuInit, (uint32_t flags))                                                                                          \
  X(cuDriverGetVersion, (int32_t* version))                                                                            \
  X(cuDeviceGet, (int32_t* device, int32_t ordinal))                                                                   \
  X(cuDeviceGetAttribute, (int32_t* value, int32_t attribute, int32_t device))                                         \
  X(cuGetErrorName, (int32_t result, const char** name))                                                               \
  X(cuDeviceGetCliqueCount, (uint64_t* count, int32_t device))                                                         \
  X(cuDeviceGetCliqueInfo, (Clique * cliques, uint64_t* count, int32_t device))                                        \
  X(cuLogicalEndpointIdReserve, (uint32_t* base, uint32_t count))                                                      \
  X(cuLogicalEndpointIdRelease, (uint32_t base, uint32_t count))                                                       \
  X(cuLogicalEndpointGetLimits, (uint64_t* alignment, uint64_t* most_bytes, const Properties* properties))             \
  X(cuLogicalEndpointCreate, (uint32_t id, const Properties* properties))                                              \
  X(cuLogicalEndpointDestroy, (uint32_t id))                                                                           \
  X(cuLogicalEndpointQuery, (uint32_t id, uint32_t count, int32_t* ready))                                             \
  X(cuLogicalEndpointBindMem, (uint32_t id, int32_t device, uint64_t offset, uint64_t physical,                        \
                               uint64_t physical_offset, uint64_t bytes, unsigned long long flags))                    \
  X(cuLogicalEndpointUnbind, (uint32_t id, int32_t device, uint64_t offset, uint64_t bytes))                           \
  X(cuLogicalEndpointExport, (void* handle, uint32_t id, int32_t handle_type))                                         \
  X(cuLogicalEndpointImport, (uint32_t id, const void* handle, int32_t handle_type))

// The address of a call of the driver by its name in cuda.h, null where the driver does not export it.
using Lookup = std::function<void*(const char* name)>;

struct Driver {
#define MOE_EP_DECLARE(name, parameters) int32_t(*name) parameters = nullptr;
  MOE_EP_ENDPOINT_CALLS(MOE_EP_DECLARE)
#undef MOE_EP_DECLARE

  static Driver load(const Lookup& lookup);
  // The first call of the list that the driver does not export; null where there is none.
  const char* missing() const;
  // Throws Error with the sentence below unless `result` is CUDA_SUCCESS.
  void check(int32_t result, const std::string& what) const;
  // "<what> failed: <CUresult's name> (<its number>)", and the remedy where the result tells it.
  std::string failure(int32_t result, const std::string& what) const;
};

// What a rank says in the vote on counted writes.
struct Probe {
  std::string reason;         // why this device has none, a sentence for the log; "" where it has them
  uint32_t clique = 0;        // devices reach each other's endpoints if theirs is the same
  bool owner_access = false;  // whether the device reaches its own endpoint, as ranks that share a device must
};

// `compiled`: whether the kernels are in this build (CUDA toolkit kToolkit or newer). Throws nothing.
Probe probe(const Driver& driver, int32_t device_index, bool compiled);

// Bytes of the endpoint of a window, `window_bytes` rounded up to what the driver binds; the window's physical memory
// must have as many. Throws Error where an endpoint of this device cannot be so large.
int64_t endpoint_bytes(const Driver& driver, int32_t device_index, int64_t window_bytes);

struct EndpointsOptions {
  int32_t device_index = 0;
  int32_t rank = 0;
  int32_t ep_size = 1;
  int64_t window_bytes = 0;
  int64_t physical_bytes = 0;  // of the window's memory, at least endpoint_bytes()
  std::chrono::milliseconds ready_timeout{30'000};
  bool share_process = false;  // tests only: beside other Endpoints of this process
};

// The endpoints of one rank. A process has one Endpoints at a time: further windows do without counted writes.
// Not thread-safe. Collective order, the caller's to keep with barriers: all ranks construct (or resume), exchange
// handle(), connect(); nobody writes before all have connected, nor once any rank may suspend or destroy.
// Every Error leaves no endpoint, id or binding behind that the failed call had made.
class Endpoints {
 public:
  // physical: the CUmemGenericAllocationHandle of the window, made with a fabric handle type; it must outlive the
  // binding, which ends with suspend() or this object. Throws Error, also where this process has an Endpoints.
  Endpoints(const Driver& driver, const EndpointsOptions& options, uint64_t physical);
  ~Endpoints();
  Endpoints(const Endpoints&) = delete;
  Endpoints& operator=(const Endpoints&) = delete;

  // Why this process can have no other Endpoints now, "" where it can.
  static std::string occupied();

  // What the peers connect to, sizeof(FabricHandle) bytes.
  std::string handle() const;
  // handles: by rank, the own one is not looked at. Returns once all endpoints are ready.
  void connect(const std::vector<std::string>& handles);
  // [W] by rank, the own one too (reachable from the own device where Probe::owner_access). They differ from rank to
  // rank and after resume(). A peer's is usable after connect().
  std::vector<uint32_t> ids() const;

  // Unbinds the memory and gives back every endpoint and id, before a checkpoint frees `physical`. Throws the first
  // Error after all has been tried.
  void suspend();
  // Makes them anew over other memory of the same size; connect() with new handles follows.
  void resume(uint64_t physical);

 private:
  void make(uint64_t physical);
  void await_ready(uint32_t first, uint32_t count) const;
  void require_open(const char* what) const;
  std::string release() noexcept;
  uint32_t id(int32_t rank) const { return base_ + static_cast<uint32_t>(rank); }

  Driver driver_;
  EndpointsOptions options_;
  int32_t device_ = 0;  // CUdevice
  uint64_t bytes_ = 0;  // of an endpoint
  bool reserved_ = false;
  uint32_t base_ = 0;
  std::vector<char> associated_;  // [W] 1 = the id names an endpoint
  bool bound_ = false;
};

#ifdef MOE_EP_CUDA
// The calls of the installed driver; null ones where it lacks them, or where there is no driver.
Driver installed_driver();
// Whether the toolkit of this build is kToolkit or newer.
bool compiled();
#endif

}  // namespace moe_ep::endpoint
