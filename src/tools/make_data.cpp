#include "tools/make_data.hpp"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <string>

#include "base/error.hpp"
#include "base/files.hpp"
#include "text/json_python.hpp"

namespace prl::tools {

std::int64_t make_sft_data(const env::Environment& environment, const MakeDataOptions& options) {
  std::int64_t count = environment.num_tasks(options.split);
  if (options.num_examples >= 0) count = std::min(count, options.num_examples);
  std::string lines;
  for (std::int64_t i = 0; i < count; ++i) {
    const env::Task task = environment.task(options.split, i);
    const auto demonstration = environment.demonstration(task);
    if (!demonstration)
      fail(ErrorCode::kInvalidArgument, "environment {} has no demonstrations to make data from; use one that has, such as reverse-text",
           environment.name());
    boost::json::array messages = task.prompt;
    messages.insert(messages.end(), demonstration->begin(), demonstration->end());
    boost::json::object row;
    row["messages"] = std::move(messages);
    if (boost::json::array tools = environment.tools(task); !tools.empty()) row["tools"] = std::move(tools);
    lines += text::to_json_text(row);
    lines += '\n';
  }
  write_file_atomic(options.output, lines);
  return count;
}

}  // namespace prl::tools
