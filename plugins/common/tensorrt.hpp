// What both plugin interfaces need of TensorRT: its types in the terms of instance.hpp, attributes
// from plugin fields, the log. Only what TensorRT 8.5 has.
#pragma once
#include <NvInferRuntime.h>

#include <exception>

#include "instance.hpp"

// IPluginV2DynamicExt for TensorRT 8; IPluginV3 from 10 on. EDGEPOOL_PLUGIN_V2 asks for the former,
// so that it can be tried without TensorRT 8.
#if defined(EDGEPOOL_PLUGIN_V2) || NV_TENSORRT_MAJOR < 10
#define EDGEPOOL_USES_V2 1
#else
#define EDGEPOOL_USES_V2 0
#endif

namespace edgepool {
namespace plugin {

// What exported nodes carry as plugin_version and plugin_namespace.
constexpr const char* kVersion = "1";
constexpr const char* kNamespace = "edgepool";

// A function of the TensorRT that this process has loaded, which this library does not link to;
// null without one.
void* tensorrt_function(const char* name);

#if !EDGEPOOL_USES_V2
void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;
#endif
void log_error(const char* text) noexcept;

// Runs f, which fills a message and returns whether it succeeded; logs the message if it did not.
template <class F>
bool succeeds(const Operator& op, F f) noexcept {
  Message message;
  try {
    if (f(message)) return true;
  } catch (const std::exception& e) { message.add("%s: %s", op.name, e.what()); } catch (...) {
    message.add("%s: an unknown exception", op.name);
  }
  log_error(message.text());
  return false;
}

Element element_of(nvinfer1::DataType type);
nvinfer1::DataType data_type_of(Element element);

// Exact extents; or, of a profile, the largest.
View view_of(const nvinfer1::PluginTensorDesc& tensor);
View view_of(const nvinfer1::DynamicPluginTensorDesc& tensor);

// At most kMaxTensors tensors at a time.
struct Views {
  View items[kMaxTensors];
};
template <class Desc>
bool views_of(const Operator& op, const Desc* tensors, int32_t count, Views& views,
              Message& message) {
  if (count < 0 || count > kMaxTensors)
    return message.refuse("%s: expected %d inputs and %d outputs, got %d", op.name, op.inputs.count,
                          op.outputs.count, count);
  if (count > 0 && !tensors)
    return message.refuse("%s: the tensors' descriptions are null", op.name);
  for (int32_t i = 0; i < count; ++i) views.items[i] = view_of(tensors[i]);
  return true;
}

// Takes all attributes of the operator from the fields.
bool parse_fields(const nvinfer1::PluginFieldCollection* fields, Instance& plugin, Message&);

// The attributes of an operator as fields: without values those that a creator asks for, or with
// values that point into `plugin`, which has to stay where it is.
struct Fields {
  nvinfer1::PluginField items[kMaxAttributes];
  nvinfer1::PluginFieldCollection collection{};
  void describe(const Operator& op);
  void describe(const Instance& plugin);
};

// The shape of an output in terms of those of the inputs.
bool output_shape(const Instance& plugin, int32_t output, const nvinfer1::DimsExprs* inputs,
                  int32_t count, nvinfer1::IExprBuilder& builder, nvinfer1::DimsExprs& shape,
                  Message& message);

}  // namespace plugin
}  // namespace edgepool
