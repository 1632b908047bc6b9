// A CUDA driver with logical endpoints and nothing behind them, for machines without a GPU. It follows the rules of the
// driver's documentation; a call that breaks one returns CUDA_ERROR_INVALID_VALUE and leaves a sentence in
// fake_violations(). Its declarations are its own, so that a mistake in those under test does not hide here.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kDeinitialized = 4, kInvalidDevice = 101;

struct Endpoint {
  int device;
  uint64_t serial, size;
  struct Binding {
    uint64_t memory, bytes;
  };
  std::map<uint64_t, Binding> bindings;  // by offset
};

struct Id {
  uint32_t base, count;  // the range it was reserved in
  std::shared_ptr<Endpoint> endpoint;
  bool owner = false;
  bool known_ready = false;  // a query has said so
  int64_t queries_left = 0;  // until it is ready
};

struct Memory {
  uint64_t bytes;
  bool fabric;
};

struct Driver {
  std::map<std::string, int64_t> knobs{
      {"version", 13040}, {"devices", 8},      {"major", 10},        {"minor", 0},           {"unicast", 1},
      {"counted", 1},     {"owner_access", 1}, {"handle_types", 1},  {"alignment", 2 << 20}, {"max_size", 1ll << 40},
      {"queries", 0},     {"never_ready", 0},  {"deinitialized", 0},
  };
  std::vector<std::pair<int, uint32_t>> cliques;
  std::map<uint32_t, Id> ids;
  std::map<uint64_t, Memory> memories;
  std::set<uint64_t> exported;  // serial numbers
  std::map<uint64_t, std::weak_ptr<Endpoint>> endpoints;
  uint32_t next_id = 1000;
  uint64_t next_serial = 1, next_memory = 1;
  int64_t associations = 0, calls = 0, fail_at = 0;
  int fail_with = 0;
  std::string failed_call, log, violations, text;
};

// Never destroyed: calls may come while the process ends.
Driver& d() {
  static Driver* driver = new Driver;
  return *driver;
}

// Begins every call; what it returns is the call's result unless kSuccess.
int begin(const char* name, const std::string& arguments) {
  const std::string line = std::string(name) + arguments;
  d().log += line + "\n";
  if (std::getenv("FAKE_DRIVER_TRACE") != nullptr) std::fprintf(stderr, "%s\n", line.c_str());
  ++d().calls;
  if (d().calls == d().fail_at) {
    d().failed_call = name;
    return d().fail_with;
  }
  return d().knobs["deinitialized"] ? kDeinitialized : kSuccess;
}

int reject(const std::string& sentence) {
  d().violations += sentence + "\n";
  return kInvalidValue;
}

template <class... Numbers>
std::string list(Numbers... numbers) {
  std::string text;
  ((text += (text.empty() ? "(" : ", ") + std::to_string(numbers)), ...);
  return text.empty() ? "()" : text + ")";
}

bool aligned(uint64_t bytes) { return bytes % static_cast<uint64_t>(d().knobs["alignment"]) == 0; }
bool is_device(int device) { return device >= 0 && device < d().knobs["devices"]; }

Id* find(uint32_t id) {
  const auto it = d().ids.find(id);
  return it == d().ids.end() ? nullptr : &it->second;
}

void associate(Id& id, std::shared_ptr<Endpoint> endpoint, bool owner) {
  id.endpoint = std::move(endpoint);
  id.owner = owner;
  id.known_ready = false;
  id.queries_left = ++d().associations == d().knobs["never_ready"] ? INT64_MAX : d().knobs["queries"];
}

}  // namespace

struct Prop {  // CUlogicalEndpointProp
  int type;
  union {
    int device;
    unsigned devices;
  };
  unsigned long long size;
  unsigned ipc_handle_types, flags;
};
struct CliqueInfo {
  int type;
  unsigned id;
};
struct Handle {
  char magic[8];
  uint64_t serial;
  char padding[48];
};
static_assert(sizeof(Handle) == 64);

static int check(const Prop* prop) {
  if (prop == nullptr) return reject("no properties");
  if (prop->type != 1) return reject("the type is not unicast");
  if (!is_device(prop->device)) return reject("an endpoint of no device");
  if (prop->size == 0) return reject("an endpoint of no bytes");
  if (prop->ipc_handle_types != 1) return reject("wrong handle types");
  if (prop->flags != 1) return reject("wrong flags");
  return kSuccess;
}

extern "C" {

// Control: settings ("never_ready" = n: the n-th endpoint created or imported never is), what happened, what is held.
void fake_reset() { d() = Driver{}; }
void fake_set(const char* knob, int64_t value) { d().knobs.at(knob) = value; }
void fake_add_clique(int type, uint32_t id) { d().cliques.emplace_back(type, id); }
// The n-th call from now on returns `result` and does nothing.
void fake_fail_at(int64_t n, int result) {
  d().fail_at = d().calls + n;
  d().fail_with = result;
}
const char* fake_failed_call() { return d().failed_call.c_str(); }
const char* fake_log() { return d().log.c_str(); }
const char* fake_violations() { return d().violations.c_str(); }
const char* fake_held() {
  std::string& text = d().text;
  text.clear();
  for (const auto& [id, entry] : d().ids) {
    text += "id " + std::to_string(id);
    if (entry.endpoint != nullptr) text += entry.owner ? " owner" : " import";
    if (entry.owner && !entry.endpoint->bindings.empty()) text += " bound";
    text += "\n";
  }
  return text.c_str();
}
uint64_t fake_create_memory(uint64_t bytes, bool fabric) {
  d().memories[d().next_memory] = {bytes, fabric};
  return d().next_memory++;
}
void fake_free_memory(uint64_t memory) {
  if (d().memories.erase(memory) == 0) reject("memory that is none was freed");
  for (const auto& [id, entry] : d().ids) {
    if (!entry.owner) continue;
    for (const auto& [offset, binding] : entry.endpoint->bindings) {
      if (binding.memory == memory) reject("memory was freed while bound");
    }
  }
}

int cuInit(unsigned flags) { return begin("cuInit", list(flags)); }
int cuDriverGetVersion(int* version) {
  if (const int result = begin("cuDriverGetVersion", "()")) return result;
  *version = static_cast<int>(d().knobs["version"]);
  return kSuccess;
}
int cuDeviceGet(int* device, int ordinal) {
  if (const int result = begin("cuDeviceGet", list(ordinal))) return result;
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (const int result = begin("cuDeviceGetAttribute", list(attribute, device))) return result;
  if (!is_device(device)) return kInvalidDevice;
  const std::map<int, const char*> names{{75, "major"},    {76, "minor"},         {153, "unicast"},
                                         {155, "counted"}, {156, "owner_access"}, {158, "handle_types"}};
  if (names.count(attribute) == 0) return reject("an attribute that nobody needs");
  if (attribute >= 153 && d().knobs["version"] < 13040) return kInvalidValue;
  *value = static_cast<int>(d().knobs.at(names.at(attribute)));
  return kSuccess;
}
int cuGetErrorName(int result, const char** name) {
  const std::map<int, const char*> names{{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                         {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                         {kDeinitialized, "CUDA_ERROR_DEINITIALIZED"},
                                         {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
                                         {401, "CUDA_ERROR_ILLEGAL_STATE"},
                                         {800, "CUDA_ERROR_NOT_PERMITTED"},
                                         {801, "CUDA_ERROR_NOT_SUPPORTED"},
                                         {802, "CUDA_ERROR_SYSTEM_NOT_READY"}};
  const auto it = names.find(result);
  *name = it == names.end() ? nullptr : it->second;
  return it == names.end() ? kInvalidValue : kSuccess;
}
int cuDeviceGetCliqueCount(size_t* count, int device) {
  if (const int result = begin("cuDeviceGetCliqueCount", list(device))) return result;
  if (!is_device(device)) return kInvalidDevice;
  *count = d().cliques.size();
  return kSuccess;
}
int cuDeviceGetCliqueInfo(CliqueInfo* cliques, size_t* count, int device) {
  if (const int result = begin("cuDeviceGetCliqueInfo", list(*count, device))) return result;
  if (!is_device(device)) return kInvalidDevice;
  if (*count > d().cliques.size()) *count = d().cliques.size();
  for (size_t i = 0; i < *count; ++i) cliques[i] = {d().cliques[i].first, d().cliques[i].second};
  return kSuccess;
}

int cuLogicalEndpointIdReserve(uint32_t* base, uint32_t count) {
  if (const int result = begin("cuLogicalEndpointIdReserve", list(count))) return result;
  if (count == 0) return reject("no ids were asked for");
  *base = d().next_id;
  for (uint32_t i = 0; i < count; ++i) d().ids[*base + i] = {*base, count, nullptr};
  d().next_id += count;
  return kSuccess;
}
int cuLogicalEndpointIdRelease(uint32_t base, uint32_t count) {
  if (const int result = begin("cuLogicalEndpointIdRelease", list(base, count))) return result;
  for (uint32_t id = base; id < base + count; ++id) {
    if (find(id) == nullptr) return reject("an id that is not reserved was released");
    if (find(id)->endpoint != nullptr) return reject("an id that names an endpoint was released");
  }
  for (uint32_t id = base; id < base + count; ++id) d().ids.erase(id);
  return kSuccess;
}
int cuLogicalEndpointGetLimits(uint64_t* alignment, uint64_t* max_size, const Prop* prop) {
  if (const int result = begin("cuLogicalEndpointGetLimits", list(prop->device, prop->size, prop->flags)))
    return result;
  if (const int result = check(prop)) return result;
  *alignment = static_cast<uint64_t>(d().knobs["alignment"]);
  *max_size = static_cast<uint64_t>(d().knobs["max_size"]);
  return kSuccess;
}
int cuLogicalEndpointCreate(uint32_t id, const Prop* prop) {
  if (const int result = begin("cuLogicalEndpointCreate", list(id, prop->device, prop->size, prop->flags)))
    return result;
  if (const int result = check(prop)) return result;
  if (!aligned(prop->size)) return reject("the size is no multiple of the alignment");
  if (prop->size > static_cast<uint64_t>(d().knobs["max_size"])) return reject("the size is above the maximum");
  if (find(id) == nullptr) return reject("create: the id is not reserved");
  if (find(id)->endpoint != nullptr) return reject("create: the id names an endpoint");
  auto endpoint = std::make_shared<Endpoint>(Endpoint{prop->device, d().next_serial++, prop->size, {}});
  d().endpoints[endpoint->serial] = endpoint;
  associate(*find(id), std::move(endpoint), true);
  return kSuccess;
}
int cuLogicalEndpointDestroy(uint32_t id) {
  if (const int result = begin("cuLogicalEndpointDestroy", list(id))) return result;
  if (find(id) == nullptr || find(id)->endpoint == nullptr) return reject("destroy: the id names no endpoint");
  if (find(id)->owner) find(id)->endpoint->bindings.clear();
  const uint32_t base = find(id)->base, count = find(id)->count;
  *find(id) = {base, count, nullptr};
  return kSuccess;
}
int cuLogicalEndpointQuery(uint32_t id, uint32_t count, int* ready) {
  if (const int result = begin("cuLogicalEndpointQuery", list(id, count))) return result;
  if (count == 0) return reject("query of nothing");
  for (uint32_t i = id; i < id + count; ++i) {
    if (find(i) == nullptr || find(i)->endpoint == nullptr) return reject("query: an id names no endpoint");
  }
  *ready = 1;
  for (uint32_t i = id; i < id + count; ++i) {
    if (find(i)->queries_left == 0) continue;
    *ready = 0;
    if (find(i)->queries_left != INT64_MAX) --find(i)->queries_left;
  }
  if (*ready) {
    for (uint32_t i = id; i < id + count; ++i) find(i)->known_ready = true;
  }
  return kSuccess;
}
int cuLogicalEndpointBindMem(uint32_t id, int device, uint64_t offset, unsigned long long memory,
                             uint64_t memory_offset, uint64_t bytes, unsigned long long flags) {
  if (const int result =
          begin("cuLogicalEndpointBindMem", list(id, device, offset, memory, memory_offset, bytes, flags))) {
    return result;
  }
  const Id* entry = find(id);
  if (entry == nullptr || entry->endpoint == nullptr) return reject("bind: the id names no endpoint");
  if (!entry->owner) return reject("bind: the endpoint is imported");
  if (!entry->known_ready) return reject("bind: no query has said that the endpoint is ready");
  if (device != entry->endpoint->device) return reject("bind: another device than the endpoint's");
  if (flags != 0) return reject("bind: wrong flags");
  if (bytes == 0 || !aligned(bytes) || !aligned(offset) || !aligned(memory_offset)) return reject("bind: misaligned");
  if (d().memories.count(memory) == 0) return reject("bind: the memory is none");
  if (!d().memories[memory].fabric) return reject("bind: the memory cannot be exported");
  if (memory_offset + bytes > d().memories[memory].bytes) return reject("bind: beyond the memory");
  if (offset + bytes > entry->endpoint->size) return reject("bind: beyond the endpoint");
  for (const auto& [at, binding] : entry->endpoint->bindings) {
    if (at < offset + bytes && offset < at + binding.bytes) return reject("bind: bound already");
  }
  entry->endpoint->bindings[offset] = {memory, bytes};
  return kSuccess;
}
int cuLogicalEndpointUnbind(uint32_t id, int device, uint64_t offset, uint64_t bytes) {
  if (const int result = begin("cuLogicalEndpointUnbind", list(id, device, offset, bytes))) return result;
  const Id* entry = find(id);
  if (entry == nullptr || entry->endpoint == nullptr || !entry->owner) return reject("unbind: no own endpoint");
  if (device != entry->endpoint->device) return reject("unbind: another device than the endpoint's");
  const auto it = entry->endpoint->bindings.find(offset);
  if (it == entry->endpoint->bindings.end() || it->second.bytes != bytes) return reject("unbind: not bound like that");
  entry->endpoint->bindings.erase(it);
  return kSuccess;
}
int cuLogicalEndpointExport(void* handle, uint32_t id, int handle_type) {
  if (const int result = begin("cuLogicalEndpointExport", list(id, handle_type))) return result;
  if (find(id) == nullptr || find(id)->endpoint == nullptr) return reject("export: the id names no endpoint");
  if (handle_type != 1) return reject("export: wrong handle type");
  const Handle made{{'e', 'n', 'd', 'p', 'o', 'i', 'n', 't'}, find(id)->endpoint->serial, {}};
  std::memcpy(handle, &made, sizeof made);
  d().exported.insert(made.serial);
  return kSuccess;
}
int cuLogicalEndpointImport(uint32_t id, const void* handle, int handle_type) {
  if (const int result = begin("cuLogicalEndpointImport", list(id, handle_type))) return result;
  if (handle_type != 1) return reject("import: wrong handle type");
  if (find(id) == nullptr) return reject("import: the id is not reserved");
  if (find(id)->endpoint != nullptr) return reject("import: the id names an endpoint");
  Handle given;
  std::memcpy(&given, handle, sizeof given);
  if (std::memcmp(given.magic, "endpoint", 8) != 0 || d().exported.count(given.serial) == 0) {
    return reject("import: the handle was never exported");
  }
  auto endpoint = d().endpoints[given.serial].lock();
  if (endpoint == nullptr) return reject("import: the endpoint is gone");
  associate(*find(id), std::move(endpoint), false);
  return kSuccess;
}

}  // extern "C"
