#include "text/jinja/iterator.hpp"

#include "text/jinja/operators.hpp"

namespace prl::text::jinja {

std::optional<Value> Iterator::next(Interpreter& interpreter) {
  interpreter.charge_step();
  if (!returned_.empty()) {
    Value value = std::move(returned_.front());
    returned_.pop_front();
    return value;
  }
  if (!next_) return std::nullopt;
  std::optional<Value> value;
  try {
    value = next_(interpreter);
  } catch (...) {
    next_ = nullptr;  // a generator that raised has ended
    throw;
  }
  if (!value) next_ = nullptr;
  return value;
}

void Iterator::put_back(std::vector<Value> items) { returned_.insert(returned_.begin(), items.begin(), items.end()); }

void Iterator::release() {
  next_ = nullptr;
  returned_.clear();
}

Iterator* as_iterator(const Value& value) { return value.is_object() ? dynamic_cast<Iterator*>(&value.object()) : nullptr; }

Value make_iterator(Interpreter& interpreter, Iterator::Next next, int depth) {
  check_depth(depth + 1);
  interpreter.charge_bytes(256);
  return Value(std::static_pointer_cast<Object>(std::make_shared<Iterator>(std::move(next), depth + 1)));
}

Cursor::Cursor(Interpreter& interpreter, Value source) : source_(std::move(source)) {
  if (as_iterator(source_) == nullptr) items_ = iterate(interpreter, source_);
}

std::optional<Value> Cursor::next(Interpreter& interpreter) {
  if (Iterator* iterator = as_iterator(source_)) return iterator->next(interpreter);
  if (at_ == items_.size()) return std::nullopt;
  return items_[at_++];
}

}  // namespace prl::text::jinja
