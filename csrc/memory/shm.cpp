#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <random>

#include "csrc/ep.h"
#include "csrc/memory/memory.h"

namespace moe_ep {
namespace {

std::string unique_name() {
  static std::atomic<uint32_t> counter{0};
  std::random_device random;
  char name[64];
  std::snprintf(name, sizeof name, "/moe_ep_%d_%u_%08x", static_cast<int>(getpid()), counter++, random());
  return name;
}

// Removes windows whose process died before seal(): until then it holds a lock on the file. A new file is
// given some seconds to be locked.
void remove_orphans() {
  DIR* directory = opendir("/dev/shm");
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    if (std::strncmp(entry->d_name, "moe_ep_", 7) != 0) continue;
    const std::string name = std::string("/") + entry->d_name;
    const int fd = shm_open(name.c_str(), O_RDWR, 0);
    if (fd < 0) continue;
    struct stat info{};
    const bool old = fstat(fd, &info) == 0 && info.st_ctime + 5 < std::time(nullptr);
    if (old && flock(fd, LOCK_EX | LOCK_NB) == 0) shm_unlink(name.c_str());
    ::close(fd);
  }
  closedir(directory);
}

class ShmMemory final : public WindowMemory {
 public:
  explicit ShmMemory(size_t bytes) : bytes_(bytes), name_(unique_name()) {
    remove_orphans();
    const int fd = shm_open(name_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    if (fd < 0) throw Error("shm_open(" + name_ + ") failed: " + std::strerror(errno));
    linked_ = fd;
    flock(fd, LOCK_EX | LOCK_NB);
    int status;
    do status = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    while (status == EINTR);
    if (status != 0) {
      release();
      throw Error("no room for a window of " + std::to_string(bytes) +
                  " bytes in POSIX shared memory: " + std::strerror(status) +
                  "; lower max_tokens_per_rank or hidden_size, or enlarge /dev/shm (docker: --shm-size)");
    }
    try {
      own_ = map(dup(fd), name_);
    } catch (...) {
      release();
      throw;
    }
  }

  ~ShmMemory() override { release(); }

  const char* kind() const override { return "shm"; }
  std::string handle() const override { return name_; }

  void connect(int rank, const std::vector<std::string>& handles) override {
    bases_.assign(handles.size(), nullptr);
    for (size_t peer = 0; peer < handles.size(); ++peer) {
      if (static_cast<int>(peer) == rank) {
        bases_[peer] = own_;
        continue;
      }
      const int fd = shm_open(handles[peer].c_str(), O_RDWR, 0);
      if (fd < 0) {
        throw Error("cannot map the window of rank " + std::to_string(peer) + ": shm_open(" + handles[peer] +
                    ") failed: " + std::strerror(errno) + "; all ranks must run on one host and share /dev/shm");
      }
      struct stat info{};
      if (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) != bytes_) {
        ::close(fd);
        throw Error("the window of rank " + std::to_string(peer) + " has " + std::to_string(info.st_size) +
                    " bytes, this rank's has " + std::to_string(bytes_));
      }
      bases_[peer] = map(fd, handles[peer]);
    }
  }

  void seal() override { unlink(); }
  const std::vector<char*>& bases() const override { return bases_; }

 private:
  char* map(int fd, const std::string& name) {
    void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const int error = errno;
    ::close(fd);
    if (address == MAP_FAILED) throw Error("mmap of " + name + " failed: " + std::strerror(error));
    return static_cast<char*>(address);
  }

  void unlink() {
    if (linked_ < 0) return;
    shm_unlink(name_.c_str());
    ::close(linked_);
    linked_ = -1;
  }

  void release() {
    unlink();
    for (char* base : bases_) {
      if (base != nullptr && base != own_) munmap(base, bytes_);
    }
    bases_.clear();
    if (own_ != nullptr) munmap(own_, bytes_);
    own_ = nullptr;
  }

  size_t bytes_;
  std::string name_;
  int linked_ = -1;  // while the name exists: the locked file
  char* own_ = nullptr;
  std::vector<char*> bases_;
};

}  // namespace

std::unique_ptr<WindowMemory> make_shm_memory(size_t bytes) { return std::make_unique<ShmMemory>(bytes); }

}  // namespace moe_ep
