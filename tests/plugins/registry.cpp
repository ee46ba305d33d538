// A plugin registry in TensorRT's place: prints what registers itself. TensorRT-RTX's has other
// virtual functions than the headers of TensorRT 10.
#include <NvInferRuntime.h>

#include <cstdio>

namespace {

class Registry : public nvinfer1::IPluginRegistry {
 public:
  bool registerCreator(nvinfer1::IPluginCreator& creator, const char* space) noexcept override {
    std::printf("%s::%s\n", space, creator.getPluginName());
    return true;
  }
  bool registerCreator(nvinfer1::IPluginCreatorInterface& creator,
                       const char* space) noexcept override {
    auto& v3 = static_cast<nvinfer1::IPluginCreatorV3One&>(creator);
    std::printf("%s::%s\n", space, v3.getPluginName());
    return true;
  }
  nvinfer1::IPluginCreator* const* getPluginCreatorList(int32_t*) const noexcept override {
    return nullptr;
  }
  nvinfer1::IPluginCreator* getPluginCreator(const char*, const char*,
                                             const char*) noexcept override {
    return nullptr;
  }
  void setErrorRecorder(nvinfer1::IErrorRecorder*) noexcept override {}
  nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
  bool deregisterCreator(const nvinfer1::IPluginCreator&) noexcept override { return false; }
  bool isParentSearchEnabled() const override { return false; }
  void setParentSearchEnabled(bool) override {}
  PluginLibraryHandle loadLibrary(const char*) noexcept override { return nullptr; }
  void deregisterLibrary(PluginLibraryHandle) noexcept override {}
  nvinfer1::IPluginCreatorInterface* const* getAllCreators(int32_t*) const noexcept override {
    return nullptr;
  }
  nvinfer1::IPluginCreatorInterface* getCreator(const char*, const char*,
                                                const char*) noexcept override {
    return nullptr;
  }
  bool deregisterCreator(const nvinfer1::IPluginCreatorInterface&) noexcept override {
    return false;
  }
  nvinfer1::IPluginResource* acquirePluginResource(const char*,
                                                   nvinfer1::IPluginResource*) noexcept override {
    return nullptr;
  }
  int32_t releasePluginResource(const char*) noexcept override { return 0; }
  nvinfer1::IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t*) noexcept override {
    return nullptr;
  }
};

}  // namespace

extern "C" nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
  static Registry registry;
  return &registry;
}
