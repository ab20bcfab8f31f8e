#include "env/made_up_world.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/rng.hpp"
#include "env/draw.hpp"

namespace prl::env {
namespace {

constexpr std::array kOnsets = {"b", "br", "d", "dr", "f", "g",  "gl", "h",  "k", "kr", "l",
                                "m", "n",  "p", "r",  "s", "st", "t",  "tr", "v", "z"};
constexpr std::array kVowels = {"a", "e", "i", "o", "u", "ai", "ea", "ou"};
constexpr std::array kTownEnds = {"burg", "field", "haven", "mouth", "stead", "ton", "vale", "wick"};
constexpr std::array kTrades = {"weaving", "glass making", "salt mining", "boat building", "bee keeping", "paper making", "bell casting"};
constexpr std::array kJobs = {"painter", "surveyor", "composer", "botanist", "clock maker", "poet", "engineer"};
constexpr std::array kDishes = {"plum soup", "smoked trout", "barley cake", "pickled pears", "nut bread", "fennel stew"};

/// A new name of two or three syllables with a capital letter.
std::string new_name(Rng& rng, const char* end, std::set<std::string>& taken) {
  for (int attempt = 0;; ++attempt) {
    std::string name;
    const std::uint64_t num_syllables = attempt < 50 ? 2 : 4;
    for (std::uint64_t i = 0; i < num_syllables; ++i) name += std::string(pick(rng, kOnsets)) + pick(rng, kVowels);
    name += end;
    name[0] = static_cast<char>(name[0] - 'a' + 'A');
    if (taken.insert(name).second) return name;
  }
}

struct Town {
  std::string name, river, founder, trade, dish;
  std::uint64_t year = 0;
};

}  // namespace

MadeUpWorld make_world(std::int64_t num_pages, std::uint64_t seed) {
  Rng rng(seed, 0x770726c64);
  std::set<std::string> taken;
  MadeUpWorld world;
  std::vector<Town> towns;
  const std::int64_t num_towns = std::max<std::int64_t>(1, num_pages / 2);
  for (std::int64_t i = 0; i < num_towns; ++i) {
    Town town;
    town.name = new_name(rng, pick(rng, kTownEnds), taken);
    town.river = new_name(rng, "", taken);
    town.founder = new_name(rng, "", taken) + " " + new_name(rng, "", taken);
    town.trade = pick(rng, kTrades);
    town.dish = pick(rng, kDishes);
    town.year = 1100 + rng.next_below(800);
    CorpusPage page;
    page.title = town.name;
    page.id = slug(town.name);
    page.sections = {{"History", fmt::format("{} was founded in {} by {}. For a long time the town lived on {}.", town.name, town.year,
                                             town.founder, town.trade)},
                     {"Geography", fmt::format("{} lies on the river {}.", town.name, town.river)},
                     {"Culture", fmt::format("Visitors of {} are served {}.", town.name, town.dish)}};
    const auto ask = [&](std::string question, std::string answer, std::size_t section) {
      world.questions.push_back({std::move(question), {std::move(answer)}, {{town.name, page.id, section}}});
    };
    ask(fmt::format("In which year was {} founded?", town.name), std::to_string(town.year), 0);
    ask(fmt::format("Who founded {}?", town.name), town.founder, 0);
    ask(fmt::format("On which river does {} lie?", town.name), town.river, 1);
    ask(fmt::format("Which dish are visitors of {} served?", town.name), town.dish, 2);
    world.pages.push_back(std::move(page));
    towns.push_back(std::move(town));
  }
  for (std::int64_t i = num_towns; i < num_pages; ++i) {
    const Town& town = towns[rng.next_below(towns.size())];
    const std::string name = new_name(rng, "", taken) + " " + new_name(rng, "", taken);
    const std::string job = pick(rng, kJobs);
    const std::uint64_t year = 1500 + rng.next_below(450);
    CorpusPage page;
    page.title = name;
    page.id = slug(name);
    page.sections = {{"Early life", fmt::format("{} was born in {} in {}.", name, town.name, year)},
                     {"Work", fmt::format("{} became known as a {}.", name, job)}};
    const CorpusQuestion::Source birth{name, page.id, 0};
    const auto ask = [&](std::string question, std::string answer, std::vector<CorpusQuestion::Source> sources) {
      world.questions.push_back({std::move(question), {std::move(answer)}, std::move(sources)});
    };
    ask(fmt::format("In which town was {} born?", name), town.name, {birth});
    ask(fmt::format("What did {} become known as?", name), job, {{name, page.id, 1}});
    ask(fmt::format("On which river does the town lie where {} was born?", name), town.river, {birth, {town.name, slug(town.name), 1}});
    ask(fmt::format("In which year was the town founded where {} was born?", name), std::to_string(town.year),
        {birth, {town.name, slug(town.name), 0}});
    world.pages.push_back(std::move(page));
  }
  return world;
}

}  // namespace prl::env
