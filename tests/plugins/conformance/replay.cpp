// Runs recorded cases through the plugins of a library, where there is no Python: under qemu-user,
// or on a board. tests/plugins/test_aarch64.py records and judges.
//
//   replay LIBRARY ENTRY                  prints the operators that it has
//   replay LIBRARY ENTRY CASES RESULTS    runs them, and writes each one's outputs
//
// The library is one with the emulation. The files are sequences of little-endian words: read().
#include <fstream>
#include <iostream>

#include "harness.cpp"

namespace {

class Reader {
 public:
  explicit Reader(const char* path) : file_(path, std::ios::binary) {}
  int64_t number() {
    int64_t value = 0;
    file_.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }
  std::string bytes() {
    std::string text(static_cast<size_t>(number()), '\0');
    file_.read(text.data(), static_cast<std::streamsize>(text.size()));
    return text;
  }
  bool good() const { return file_.good(); }

 private:
  std::ifstream file_;
};

// What the library's libcudart gives.
struct Cuda {
  cudaError_t (*allocate)(void**, size_t);
  cudaError_t (*release)(void*);
  cudaError_t (*copy)(void*, const void*, size_t, cudaMemcpyKind);
  int (*imitate)(int);

  explicit Cuda(void* library)
      : allocate(symbol<cudaError_t(void**, size_t)>(library, "cudaMalloc")),
        release(symbol<cudaError_t(void*)>(library, "cudaFree")),
        copy(
            symbol<cudaError_t(void*, const void*, size_t, cudaMemcpyKind)>(library, "cudaMemcpy")),
        imitate(symbol<int(int)>(library, "emulation_set_architecture")) {}
};

struct Tensor {
  nvinfer1::PluginTensorDesc desc{};
  size_t size = 0;
  void* memory = nullptr;
  bool own = false;

  void give(const Cuda& cuda) { own = cuda.allocate(&memory, size) == cudaSuccess; }
};

Tensor read_tensor(Reader& from) {
  Tensor tensor;
  tensor.desc.type = static_cast<DataType>(from.number());
  tensor.desc.format = nvinfer1::TensorFormat::kLINEAR;
  tensor.desc.dims.nbDims = static_cast<int32_t>(from.number());
  for (int i = 0; i < tensor.desc.dims.nbDims; ++i) tensor.desc.dims.d[i] = from.number();
  tensor.size = static_cast<size_t>(from.number());
  return tensor;
}

int creator_of(const Host* host, const std::string& name) {
  for (int i = 0; i < creator_count(host); ++i)
    if (name == creator_name(host, i)) return i;
  return -1;
}

Plugin* create(const Host* host, Reader& from) {
  const std::string name = from.bytes();
  std::vector<std::pair<std::string, std::string>> texts(static_cast<size_t>(from.number()));
  std::vector<nvinfer1::PluginField> fields;
  for (auto& [field, value] : texts) {
    field = from.bytes();
    const auto type = static_cast<nvinfer1::PluginFieldType>(from.number());
    const auto length = static_cast<int32_t>(from.number());
    value = from.bytes();
    fields.emplace_back(field.c_str(), value.data(), type, length);
  }
  PluginFieldCollection collection{};
  collection.nbFields = static_cast<int32_t>(fields.size());
  collection.fields = fields.data();
  return creator_create(host, creator_of(host, name), "layer", &collection, 0);
}

// One case: device, creator and attributes, inputs with their bytes, outputs with the input that
// each is the new state of, or -1. Writes the outputs' bytes; false if the plugin fails.
bool run(const Host* host, const Cuda& cuda, Reader& from, std::ostream& to) {
  cuda.imitate(static_cast<int>(from.number()));
  Plugin* plugin = create(host, from);
  if (!plugin) return false;
  const int inputs = static_cast<int>(from.number()), outputs = static_cast<int>(from.number());
  std::vector<Tensor> tensors;
  for (int i = 0; i < inputs; ++i) {
    Tensor input = read_tensor(from);
    const std::string bytes = from.bytes();
    input.give(cuda);
    cuda.copy(input.memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    tensors.push_back(input);
  }
  for (int i = 0; i < outputs; ++i) {
    Tensor output = read_tensor(from);
    const int64_t alias = from.number();
    if (alias >= 0)
      output.memory = tensors[static_cast<size_t>(alias)].memory;
    else
      output.give(cuda);
    tensors.push_back(output);
  }
  std::vector<nvinfer1::PluginTensorDesc> descs;
  std::vector<nvinfer1::DynamicPluginTensorDesc> profile;
  std::vector<void*> memory;
  for (const Tensor& tensor : tensors) {
    descs.push_back(tensor.desc);
    profile.push_back({tensor.desc, tensor.desc.dims, tensor.desc.dims, tensor.desc.dims});
    memory.push_back(tensor.memory);
  }
  Tensor workspace;
  bool good = plugin_configure(plugin, profile.data(), inputs, outputs) == 0;
  workspace.size = plugin_workspace(plugin, profile.data(), inputs, outputs);
  workspace.give(cuda);
  good = good && plugin_shape_change(plugin, descs.data(), inputs, outputs) == 0 &&
         plugin_enqueue(plugin, descs.data(), inputs, memory.data(), memory.data() + inputs,
                        workspace.memory, nullptr) == 0;
  for (size_t i = static_cast<size_t>(inputs); good && i < tensors.size(); ++i) {
    std::string bytes(tensors[i].size, '\0');
    cuda.copy(bytes.data(), tensors[i].memory, bytes.size(), cudaMemcpyDeviceToHost);
    to.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  plugin_destroy(plugin);
  for (const Tensor& tensor : tensors)
    if (tensor.own) cuda.release(tensor.memory);
  cuda.release(workspace.memory);
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3 && count != 5) return std::cerr << "replay LIBRARY ENTRY [CASES RESULTS]\n", 2;
  const Host* host = host_open(arguments[1], arguments[2]);
  if (!host) return std::cerr << "error: " << host_crash() << "\n", 1;
  for (int i = 0; count == 3 && i < creator_count(host); ++i)
    std::cout << creator_namespace(host, i) << "::" << creator_name(host, i) << " version "
              << creator_version(host, i) << ", IPluginV" << creator_interface(host, i) << "\n";
  if (count == 3) return 0;

  const Cuda cuda(dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL));
  Reader from(arguments[3]);
  std::ofstream to(arguments[4], std::ios::binary);
  const int64_t cases = from.number();
  for (int64_t i = 0; i < cases; ++i)
    if (!run(host, cuda, from, to) || !from.good() || host_messages()) {
      int severity = 0;
      std::cerr << "error: case " << i << " failed: " << host_crash()
                << (host_messages() ? host_message(0, &severity) : "") << "\n";
      return 1;
    }
  return 0;
}
