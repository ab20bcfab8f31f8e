#pragma once

#include <utility>
#include <variant>

#include "base/error.hpp"

namespace prl {

/// A value, or the Error that explains its absence, for failures the caller handles now. Member names follow std::expected.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }
  /// Throws the held Error if there is no value.
  T& value() & { return has_value() ? std::get<0>(state_) : throw std::get<1>(state_); }
  const T& value() const& { return has_value() ? std::get<0>(state_) : throw std::get<1>(state_); }
  T&& value() && { return has_value() ? std::get<0>(std::move(state_)) : throw std::get<1>(state_); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const {
    PRL_CHECK(!has_value(), "error() called on a Result that holds a value");
    return std::get<1>(state_);
  }

 private:
  std::variant<T, Error> state_;
};

}  // namespace prl
