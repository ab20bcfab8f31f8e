#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nn/element_ranges.hpp"
#include "nn/model_config.hpp"
#include "nn/tensor_table.hpp"
#include "tensor/tensor.hpp"

namespace prl::nn {

/// A trainable tensor of the table with its memory.
struct NamedParameter : TensorSpec {
  Tensor value;  ///< fp32 master; undefined unless all of it is held
  Tensor grad;   ///< fp32, same shape; undefined until ensure_grads()
};

/// fp32 masters of the trainable tensors of a table, in one array laid out as TensorTable says. Ranks that train together hold ranges of
/// it each, one after the other in memory. One thread at a time, as the device's stream.
class Masters {
 public:
  /// Gives memory for that many fp32 elements.
  using Allocate = std::function<Tensor(std::int64_t)>;
  /// Holds those of `held` alone, all zero, in memory of `allocate`; empty: on the device. `config` is what the table was made from.
  Masters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, TensorTablePtr table, ElementRanges held,
          Allocate allocate = {});
  const ModelConfig& config() const noexcept { return config_; }
  const TensorTablePtr& table() const noexcept { return table_; }
  /// In the table's order.
  std::span<NamedParameter> named() noexcept { return named_; }
  std::span<const NamedParameter> named() const noexcept { return named_; }
  /// Error{kNotFound} if there is no trainable tensor of that name.
  NamedParameter& at(const std::string& name);
  /// Which masters there are here, and whether those are all.
  const ElementRanges& held() const noexcept { return held_; }
  bool holds_all() const noexcept { return held_.count() == table_->num_master_elements(); }
  /// Others from now on: those that were held keep their values, new ones are zero.
  void hold(const ElementRanges& ranges);
  /// [held().count()] fp32, and a part of one of the ranges.
  const Tensor& held_values() const noexcept { return values_; }
  Tensor values_in(ElementRange range) const;
  /// Those of elements [begin, begin + values.size()) that are held become `values`, which lie in host memory.
  void write_held(std::int64_t begin, std::span<const float> values);
  /// [n] fp32, the memory behind all values. PRL_CHECK: all are held.
  const Tensor& all_values() const;
  /// The fp32 block of a kind; undefined if the model has none, or if it is held in part.
  const Tensor& value(Block block, std::int64_t layer = -1, std::int64_t expert = -1) const {
    return find(values_of_blocks_, block, layer, expert);
  }
  /// Normal(0, std) for matrices, ones for norms, zeros for biases and sinks; a pure function of (config, seed).
  void init_random(std::uint64_t seed, float std_dev = 0.02f);

 protected:
  const std::shared_ptr<DeviceRuntime>& runtime() const noexcept { return runtime_; }
  /// One tensor per block of the table, parts of `array`, which lies behind those elements; undefined where they are not all there.
  std::vector<Tensor> cut(const Tensor& array, const ElementRanges& elements) const;
  const Tensor& find(const std::vector<Tensor>& blocks, Block block, std::int64_t layer, std::int64_t expert) const;

 private:
  void cut_values();

  ModelConfig config_;
  TensorTablePtr table_;
  std::shared_ptr<DeviceRuntime> runtime_;
  std::vector<NamedParameter> named_;
  ElementRanges held_;
  Allocate allocate_;
  Tensor values_;
  std::vector<Tensor> values_of_blocks_;
};

}  // namespace prl::nn
