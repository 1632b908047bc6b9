// Serves a packaged MoE layer without Python: opens this rank's communicator, loads the package, runs it once.
//
//   aoti_loader PACKAGE DIRECTORY COMM RANK WORLD_SIZE
//
// DIRECTORY has the inputs of rank r as raw x.r (float32 [T, H]), local.r (int32 [L]), up.r and down.r (float32
// [L, H, F] and [L, F, H]), and shape.r: T H L F C K in text. Ranks exchange their handles through files there; the
// output is written to out.r.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "csrc/communicator.h"

namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new", std::ios::binary) << text;
  std::filesystem::rename(path + ".new", path);  // whoever sees it sees all of it
}

struct Rank {
  std::string directory;
  int rank, world_size;

  std::string path(const std::string& name, int of) const { return directory + "/" + name + "." + std::to_string(of); }

  // What every rank wrote under `name`, by rank.
  std::vector<std::string> gather(const std::string& name, const std::string& own) const {
    write(path(name, rank), own);
    std::vector<std::string> texts;
    for (int peer = 0; peer < world_size; ++peer) {
      while (!std::filesystem::exists(path(name, peer))) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      texts.push_back(read(path(name, peer)));
    }
    return texts;
  }

  at::Tensor tensor(const std::string& name, at::IntArrayRef sizes, at::ScalarType type) const {
    std::string bytes = read(path(name, rank));
    const at::Tensor tensor = at::from_blob(bytes.data(), sizes, at::TensorOptions(type)).clone();
    TORCH_CHECK(bytes.size() == tensor.nbytes(), name, ": expected ", tensor.nbytes(), " bytes, got ", bytes.size());
    return tensor;
  }
};

}  // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 6, "expected PACKAGE DIRECTORY COMM RANK WORLD_SIZE");
  const Rank me{argv[2], std::stoi(argv[4]), std::stoi(argv[5])};
  int tokens, hidden, local, inner, capacity, top_k;
  std::istringstream(read(me.path("shape", me.rank))) >> tokens >> hidden >> local >> inner >> capacity >> top_k;

  moe_ep::CommunicatorOptions options;
  options.name = argv[3];
  options.rank = me.rank;
  options.shape.ep_size = me.world_size;
  options.shape.max_tokens = capacity;
  options.shape.max_top_k = top_k;
  options.shape.dispatch_row_bytes = options.shape.combine_row_bytes = moe_ep::round_up(hidden * 4, 16);
  const auto communicator = moe_ep::open(options);
  communicator->connect(me.gather("handle", communicator->memory().handle()));
  me.gather("connected", "");
  communicator->memory().seal();

  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const std::vector<at::Tensor> outputs = model.run({
      me.tensor("x", {tokens, hidden}, at::kFloat),
      me.tensor("local", {local}, at::kInt),
      me.tensor("up", {local, hidden, inner}, at::kFloat),
      me.tensor("down", {local, inner, hidden}, at::kFloat),
  });
  const at::Tensor out = outputs.at(0).contiguous();
  write(me.path("out", me.rank), std::string(static_cast<const char*>(out.const_data_ptr()), out.nbytes()));
  std::cout << communicator->host().round << " rounds" << std::endl;
  moe_ep::close(options.name);
}
