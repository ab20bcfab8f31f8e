#include "env/task.hpp"

#include <boost/json/serialize.hpp>

#include "base/files.hpp"

namespace prl::env {

std::uint64_t Task::key() const {
  boost::json::object parts;
  parts["prompt"] = prompt;
  parts["answer"] = answer;
  parts["info"] = info;
  if (row) parts["info"].get_object()["row"] = row->values;
  return hash_bytes(boost::json::serialize(parts));
}

}  // namespace prl::env
