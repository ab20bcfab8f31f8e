#include <utility>

#include "grammar/json_schema.hpp"

namespace prl::grammar {
namespace {

#define PRL_DATE "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
#define PRL_TIME "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
#define PRL_LABEL "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
#define PRL_BYTE "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
#define PRL_GROUP "[0-9a-f]{1,4}"

// RFC 3339 (no 29 February, which not every year has), 4122, 5321 and 1123 (lower case, short labels), 2673, 4291, 3986, 8601.
constexpr std::pair<std::string_view, std::string_view> kFormats[] = {
    {"date", "^" PRL_DATE "$"},
    {"time", "^" PRL_TIME "$"},
    {"date-time", "^" PRL_DATE "T" PRL_TIME "$"},
    {"duration", "^P([0-9]{1,4}W|[0-9]{1,4}D(T[0-9]{1,4}[HMS])?|T([0-9]{1,4}H)?[0-9]{1,4}M|T[0-9]{1,6}S)$"},
    {"uuid", "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
    {"email", "^[A-Za-z0-9_+-]{1,32}(\\.[A-Za-z0-9_+-]{1,32}){0,2}@" PRL_LABEL "(\\." PRL_LABEL "){0,2}\\.[a-z]{2,12}$"},
    {"hostname", "^" PRL_LABEL "(\\." PRL_LABEL "){0,4}$"},
    {"ipv4", "^" PRL_BYTE "(\\." PRL_BYTE "){3}$"},
    {"ipv6", "^" PRL_GROUP "(:" PRL_GROUP "){7}$"},
    {"uri",
     "^(https?|ftp)://" PRL_LABEL "(\\." PRL_LABEL "){0,4}(:[1-9][0-9]{0,3})?(/[A-Za-z0-9._~-]{0,64}){0,8}(\\?[A-Za-z0-9._~=&-]{0,128})?$"},
};

}  // namespace

std::string_view format_pattern(std::string_view format) {
  for (const auto& [name, pattern] : kFormats)
    if (name == format) return pattern;
  return {};
}

}  // namespace prl::grammar
