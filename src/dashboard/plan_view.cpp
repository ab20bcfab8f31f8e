#include "dashboard/plan_view.hpp"

#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "base/regular_file.hpp"
#include "dashboard/inside.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;

std::string plans_json(const fs::path& folder) {
  constexpr std::size_t kMaxPlans = 64;
  constexpr std::uint64_t kMaxPlanBytes = std::uint64_t{1} << 20;
  std::vector<fs::path> files;
  std::error_code ec;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end && files.size() < kMaxPlans; it.increment(ec))
    if (it->path().extension() == ".json") files.push_back(it->path());
  std::sort(files.begin(), files.end());
  std::string out = "[";
  for (const fs::path& file : files) {
    boost::json::error_code bad;
    boost::json::value plan;
    if (!is_inside(folder.parent_path(), file)) continue;
    try {
      plan = boost::json::parse(read_regular_file(file, kMaxPlanBytes), bad);
    } catch (const Error&) {
      continue;
    }
    if (bad || !plan.is_object()) continue;
    if (out.size() > 1) out += ',';
    out += boost::json::serialize(plan);
  }
  return out + "]";
}

}  // namespace prl::dashboard
