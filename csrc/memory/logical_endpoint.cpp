#include "csrc/memory/logical_endpoint.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

namespace moe_ep::endpoint {
namespace {

std::atomic<bool> process_has_one{false};

int32_t device_of(const Driver& driver, int32_t device_index) {
  int32_t device = 0;
  driver.check(driver.cuDeviceGet(&device, device_index), "cuDeviceGet");
  return device;
}

std::string driver_name(const Driver& driver) {
  int32_t version = 0;
  driver.check(driver.cuDriverGetVersion(&version), "cuDriverGetVersion");
  return "the driver (CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) + ")";
}

Probe examine(const Driver& driver, int32_t device_index, bool compiled) {
  Probe found;
  const auto refuse = [](std::string reason) {
    Probe refused;
    refused.reason = std::move(reason);
    return refused;
  };
  if (!compiled) return refuse("built with a CUDA toolkit older than 13.4");
  // Every driver exports these.
  if (driver.cuInit == nullptr || driver.cuDriverGetVersion == nullptr || driver.cuDeviceGet == nullptr ||
      driver.cuDeviceGetAttribute == nullptr) {
    return refuse(std::string("there is no CUDA driver, or one that does not export ") + driver.missing());
  }
  driver.check(driver.cuInit(0), "cuInit");
  const int32_t device = device_of(driver, device_index);
  const auto attribute = [&](int32_t number, const char* name) {
    int32_t value = 0;
    driver.check(driver.cuDeviceGetAttribute(&value, number, device), std::string("cuDeviceGetAttribute of ") + name);
    return value;
  };
  const int32_t major = attribute(kCapabilityMajor, "COMPUTE_CAPABILITY_MAJOR");
  const int32_t minor = attribute(kCapabilityMinor, "COMPUTE_CAPABILITY_MINOR");
  if (major < 10) {
    return refuse("compute capability " + std::to_string(major) + "." + std::to_string(minor) + " is below 10.0");
  }
  if (const char* name = driver.missing()) {
    return refuse(driver_name(driver) + " does not export " + name + ": it needs the 615 branch or newer");
  }
  if (attribute(kUnicastSupported, "LOGICAL_ENDPOINT_UNICAST_SUPPORTED") == 0) {
    return refuse("the device has no unicast logical endpoints");
  }
  if (attribute(kCountedOpsSupported, "LOGICAL_ENDPOINT_COUNTED_OPS_SUPPORTED") == 0) {
    return refuse("the device's logical endpoints have no counted operations");
  }
  if ((attribute(kSupportedHandleTypes, "LOGICAL_ENDPOINT_SUPPORTED_HANDLE_TYPES") & kFabric) == 0) {
    return refuse("the device's logical endpoints cannot be exported as fabric handles");
  }
  found.owner_access =
      attribute(kOwnerAccessSupported, "LOGICAL_ENDPOINT_UNICAST_ACCESS_ON_OWNER_DEVICE_SUPPORTED") != 0;
  uint64_t count = 0;
  driver.check(driver.cuDeviceGetCliqueCount(&count, device), "cuDeviceGetCliqueCount");
  std::vector<Clique> cliques(count);
  if (count > 0) {
    driver.check(driver.cuDeviceGetCliqueInfo(cliques.data(), &count, device), "cuDeviceGetCliqueInfo");
    cliques.resize(std::min(count, static_cast<uint64_t>(cliques.size())));
  }
  for (const Clique& clique : cliques) {
    if (clique.type != kUnicastClique) continue;
    found.clique = clique.id;
    return found;
  }
  return refuse("the device is in no clique of unicast logical endpoints: is it on an NVLink fabric?");
}

struct Limits {
  uint64_t alignment = 0;
  uint64_t most_bytes = 0;
};

Properties properties_of(int32_t device, uint64_t bytes) {
  Properties properties;
  properties.device = device;
  properties.size = bytes;
  return properties;
}

uint64_t rounded_bytes(const Driver& driver, int32_t device, int64_t window_bytes) {
  if (window_bytes <= 0) {
    throw ArgumentError("window_bytes: expected at least 1, got " + std::to_string(window_bytes));
  }
  const auto wanted = static_cast<uint64_t>(window_bytes);
  const Properties properties = properties_of(device, wanted);
  Limits limits;
  driver.check(driver.cuLogicalEndpointGetLimits(&limits.alignment, &limits.most_bytes, &properties),
               "cuLogicalEndpointGetLimits");
  if (limits.alignment == 0) throw Error("cuLogicalEndpointGetLimits gave the alignment 0");
  const uint64_t bytes = (wanted + limits.alignment - 1) / limits.alignment * limits.alignment;
  if (bytes > limits.most_bytes) {
    throw Error("a window of " + std::to_string(window_bytes) + " bytes is larger than a logical endpoint may be, " +
                std::to_string(limits.most_bytes) + " bytes; lower max_tokens_per_rank");
  }
  return bytes;
}

}  // namespace

Driver Driver::load(const Lookup& lookup) {
  Driver driver;
#define MOE_EP_LOAD(name, parameters) driver.name = reinterpret_cast<int32_t(*) parameters>(lookup(#name));
  MOE_EP_ENDPOINT_CALLS(MOE_EP_LOAD)
#undef MOE_EP_LOAD
  return driver;
}

const char* Driver::missing() const {
#define MOE_EP_FIND(name, parameters)                                                                                  \
  if (this->name == nullptr) return #name;
  MOE_EP_ENDPOINT_CALLS(MOE_EP_FIND)
#undef MOE_EP_FIND
  return nullptr;
}

std::string Driver::failure(int32_t result, const std::string& what) const {
  const char* name = nullptr;
  if (cuGetErrorName == nullptr || cuGetErrorName(result, &name) != 0 || name == nullptr) name = "CUresult";
  std::string text = what + " failed: " + name + " (" + std::to_string(result) + ")";
  if (result == kSystemNotReady || result == kIllegalState) {
    text += "; are the daemons of the fabric (fabric manager, IMEX) running?";
  } else if (result == kNotPermitted) {
    text += "; does this process have an IMEX channel?";
  }
  return text;
}

void Driver::check(int32_t result, const std::string& what) const {
  if (result != 0) throw Error(failure(result, what));
}

Probe probe(const Driver& driver, int32_t device_index, bool compiled) {
  try {
    return examine(driver, device_index, compiled);
  } catch (const Error& error) {
    Probe refused;
    refused.reason = error.what();
    return refused;
  }
}

int64_t endpoint_bytes(const Driver& driver, int32_t device_index, int64_t window_bytes) {
  return static_cast<int64_t>(rounded_bytes(driver, device_of(driver, device_index), window_bytes));
}

std::string Endpoints::occupied() {
  return process_has_one ? "this process has a window with logical endpoints; a process has one at a time" : "";
}

Endpoints::Endpoints(const Driver& driver, const EndpointsOptions& options, uint64_t physical)
    : driver_(driver), options_(options) {
  if (options.ep_size < 1 || options.rank < 0 || options.rank >= options.ep_size) {
    throw ArgumentError("rank: expected 0..ep_size - 1 = " + std::to_string(options.ep_size - 1) + ", got " +
                        std::to_string(options.rank));
  }
  if (const char* name = driver.missing()) throw Error(std::string("the driver does not export ") + name);
  if (!options.share_process && process_has_one.exchange(true)) throw Error(occupied());
  try {
    device_ = device_of(driver_, options.device_index);
    bytes_ = rounded_bytes(driver_, device_, options.window_bytes);
    if (options.physical_bytes < static_cast<int64_t>(bytes_)) {
      throw ArgumentError("physical_bytes: expected at least endpoint_bytes() = " + std::to_string(bytes_) + ", got " +
                          std::to_string(options.physical_bytes));
    }
    make(physical);
  } catch (...) {
    if (!options.share_process) process_has_one = false;
    throw;
  }
}

Endpoints::~Endpoints() {
  release();  // What still fails now is lost with the context.
  if (!options_.share_process) process_has_one = false;
}

void Endpoints::make(uint64_t physical) {
  const auto ranks = static_cast<uint32_t>(options_.ep_size);
  try {
    driver_.check(driver_.cuLogicalEndpointIdReserve(&base_, ranks), "cuLogicalEndpointIdReserve");
    reserved_ = true;
    associated_.assign(ranks, 0);
    const uint32_t own = id(options_.rank);
    const Properties properties = properties_of(device_, bytes_);
    driver_.check(driver_.cuLogicalEndpointCreate(own, &properties), "cuLogicalEndpointCreate");
    associated_[static_cast<size_t>(options_.rank)] = 1;
    await_ready(own, 1);
    driver_.check(driver_.cuLogicalEndpointBindMem(own, device_, 0, physical, 0, bytes_, 0),
                  "cuLogicalEndpointBindMem");
    bound_ = true;
  } catch (...) {
    release();
    throw;
  }
}

void Endpoints::require_open(const char* what) const {
  if (!reserved_) throw Error(std::string(what) + ": the logical endpoints are suspended; resume() them first");
}

std::string Endpoints::handle() const {
  require_open("handle");
  FabricHandle handle{};
  driver_.check(driver_.cuLogicalEndpointExport(&handle, id(options_.rank), kFabric), "cuLogicalEndpointExport");
  return std::string(reinterpret_cast<const char*>(handle.data), sizeof handle.data);
}

void Endpoints::connect(const std::vector<std::string>& handles) {
  require_open("connect");
  const size_t ranks = associated_.size();
  if (handles.size() != ranks) {
    throw ArgumentError("handles: expected one per rank, " + std::to_string(ranks) + ", got " +
                        std::to_string(handles.size()));
  }
  const auto own = static_cast<size_t>(options_.rank);
  for (size_t peer = 0; peer < ranks; ++peer) {
    if (peer == own) continue;
    if (handles[peer].size() != sizeof(FabricHandle)) {
      throw ArgumentError("handles: expected " + std::to_string(sizeof(FabricHandle)) + " bytes of rank " +
                          std::to_string(peer) + ", got " + std::to_string(handles[peer].size()));
    }
    if (associated_[peer]) throw Error("connect: rank " + std::to_string(peer) + "'s endpoint is connected already");
  }
  try {
    for (size_t peer = 0; peer < ranks; ++peer) {
      if (peer == own) continue;
      FabricHandle handle;
      std::memcpy(handle.data, handles[peer].data(), sizeof handle.data);
      driver_.check(driver_.cuLogicalEndpointImport(id(static_cast<int32_t>(peer)), &handle, kFabric),
                    "cuLogicalEndpointImport of rank " + std::to_string(peer) + "'s endpoint");
      associated_[peer] = 1;
    }
    await_ready(base_, static_cast<uint32_t>(ranks));
  } catch (...) {
    for (size_t peer = 0; peer < ranks; ++peer) {
      if (peer == own || !associated_[peer]) continue;
      if (driver_.cuLogicalEndpointDestroy(id(static_cast<int32_t>(peer))) == 0) associated_[peer] = 0;
    }
    throw;
  }
}

std::vector<uint32_t> Endpoints::ids() const {
  require_open("ids");
  std::vector<uint32_t> all;
  for (int32_t rank = 0; rank < options_.ep_size; ++rank) all.push_back(id(rank));
  return all;
}

void Endpoints::suspend() {
  require_open("suspend");
  const std::string failure = release();
  if (!failure.empty()) throw Error(failure);
}

void Endpoints::resume(uint64_t physical) {
  if (reserved_) throw Error("resume: the logical endpoints are not suspended");
  make(physical);
}

// Create and import return before the endpoint is there; binding or writing before that is an error.
void Endpoints::await_ready(uint32_t first, uint32_t count) const {
  const auto is_ready = [this](uint32_t from, uint32_t n) {
    int32_t ready = 0;
    driver_.check(driver_.cuLogicalEndpointQuery(from, n, &ready), "cuLogicalEndpointQuery");
    return ready != 0;
  };
  const auto deadline = std::chrono::steady_clock::now() + options_.ready_timeout;
  while (!is_ready(first, count)) {
    if (std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      continue;
    }
    std::string late;
    for (uint32_t i = first; i < first + count; ++i) {
      if (!is_ready(i, 1)) late += (late.empty() ? "" : ", ") + std::to_string(i - base_);
    }
    throw Error("after " + std::to_string(options_.ready_timeout.count()) +
                " ms the driver has not made the logical endpoints of these ranks ready: " + late +
                "; are the daemons of the fabric (fabric manager, IMEX) running?");
  }
}

// Gives back what is held, as far as it goes; returns the first failure. An id that still names an endpoint must not be
// released, so one that cannot be destroyed keeps the whole range.
std::string Endpoints::release() noexcept {
  std::string failure;
  const auto done = [&](int32_t result, const char* what) {
    if (result != 0 && failure.empty()) failure = driver_.failure(result, what);
    return result == 0;
  };
  if (bound_) done(driver_.cuLogicalEndpointUnbind(id(options_.rank), device_, 0, bytes_), "cuLogicalEndpointUnbind");
  bound_ = false;  // Destroying the endpoint unbinds too.
  bool all_destroyed = true;
  for (size_t rank = 0; rank < associated_.size(); ++rank) {
    if (!associated_[rank]) continue;
    all_destroyed &= done(driver_.cuLogicalEndpointDestroy(id(static_cast<int32_t>(rank))), "cuLogicalEndpointDestroy");
  }
  associated_.clear();
  if (reserved_ && all_destroyed) {
    done(driver_.cuLogicalEndpointIdRelease(base_, static_cast<uint32_t>(options_.ep_size)),
         "cuLogicalEndpointIdRelease");
  }
  reserved_ = false;
  return failure;
}

}  // namespace moe_ep::endpoint
