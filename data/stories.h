// stories.h - a story world that makes its own training text, and questions to mark.
//
//   Ann took the cup. Ann went to the barn. Bob went to the yard.
//   Where is the cup? In the barn.
//
// People go to places, put things there, take them along, hand them over; in between, somebody asks. No question
// gives its answer away: one has to look back for the sentence that decides, past others about other people
// and things, and sometimes to put two together. So learning shows as right answers, not only as a falling loss.
//
// Story n of a split is a pure function of n, the split and the length allowed. The text itself decides what
// split it may be in (the rule of text_to_shards), so no held-out story is ever a training story.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "../dev/common/random.h"  // uniform
#include "sha256.h"                // sha256_prefix

enum class StorySplit { train, val, test };

// What it takes to answer. All but the first have at least one other sentence between the fact and the question.
enum class StoryKind { just_told, where_person, where_thing, who_has, carried, before };
constexpr size_t NUM_STORY_KINDS = 6;
constexpr const char* STORY_KIND_NAMES[] = {  // by enum value
    "told in the last sentence", "where someone is", "where a thing is", "who has a thing",
    "where a carried thing is", "where it was before"};

struct StoryQuestion {
  StoryKind kind;
  size_t begin, end;   // the answer is tokens begin .. end-1 of the story
  std::string answer;  // the same as text
  std::string latest;  // the last place or person (whichever is asked for) named before: a lazy reader's answer
};

struct Story {
  std::string text;
  std::vector<StoryQuestion> questions;
  // Byte tokens: end-of-text (256), then the text. Question positions count from that first token.
  std::vector<int> tokens() const {
    std::vector<int> ids = {256};
    for (char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  // The same as one window of T inputs and T targets, filled up with end-of-text. Token t is the target at t - 1.
  void window(size_t T, int* inputs /* (T) */, int* targets /* (T) */) const {
    std::vector<int> ids = tokens();
    ids.resize(T + 1, ids[0]);
    std::copy(ids.begin(), ids.end() - 1, inputs);
    std::copy(ids.begin() + 1, ids.end(), targets);
  }
};

// ---- telling one story ---------------------------------------------------------------------------------
class StoryTeller {
 public:
  StoryTeller(uint64_t stream, uint64_t attempt, size_t max_bytes)
      : stream(stream), draw(attempt << 32), max_bytes(max_bytes) {}

  Story tell() {
    for (size_t name : choose(2 + below(2))) people.push_back({name, {}, 0, false, false});
    for (size_t name : choose(1 + below(2))) things.push_back({name, {}, NOBODY, 0, 0, 0, false, false, false, false});
    for (bool more = true; more;) {
      for (size_t n = 1 + below(3); more && n > 0; n--) more = happen();
      for (size_t n = 1 + below(2); more && n > 0; n--) more = ask();
    }
    // What is told after the last question helps to answer nothing.
    story.text.resize(story.questions.empty() ? 0 : story.questions.back().end - 1 + strlen(".\n"));
    return story;
  }

 private:
  static constexpr uint64_t SEED = 0x73746f7279;  // "story"
  static constexpr size_t NAMES = 8, NOBODY = NAMES;
  static constexpr const char* PEOPLE[] = {"Ann", "Bob", "Cid", "Dan", "Eve", "Flo", "Gus", "Hal"};
  static constexpr const char* THINGS[] = {"axe", "cup", "fan", "hat", "key", "map", "pen", "toy"};
  static constexpr const char* PLACES[] = {"barn", "cave", "dock", "farm", "hall", "park", "shed", "yard"};

  // Where somebody or something is, the last of `trail`, and was before. A sentence that says so has a number;
  // 0: it follows from others only.
  struct Person {
    size_t name;
    std::vector<size_t> trail;
    size_t told;
    bool asked, asked_before;  // since the last change
  };
  struct Thing {
    size_t name;
    std::vector<size_t> trail;
    size_t holder, told, told_holder, moved;  // moved: the sentence in which its holder took it along
    bool carried, asked, asked_holder, asked_before;
  };
  struct Candidate {  // a question that could be asked now
    StoryKind kind;
    std::string question, answer;
    bool* asked;
  };

  uint64_t stream, draw;
  size_t max_bytes, sentences = 0;
  Story story;
  std::vector<Person> people;
  std::vector<Thing> things;
  std::vector<std::string> named_people, named_places;  // in the order of the text

  size_t below(size_t n) { return size_t(uniform(SEED, stream, draw++) * double(n)); }
  std::vector<size_t> choose(size_t n) {  // n different ones of NAMES
    std::vector<size_t> all(NAMES);
    for (size_t i = 0; i < NAMES; i++) all[i] = i;
    for (size_t i = 0; i < n; i++) std::swap(all[i], all[i + below(NAMES - i)]);
    all.resize(n);
    return all;
  }

  // ---- what happens
  static bool known(const std::vector<size_t>& trail) { return !trail.empty(); }
  static bool may_meet(const std::vector<size_t>& a, const std::vector<size_t>& b) {
    return a.empty() || b.empty() || a.back() == b.back();
  }
  bool add(const std::string& text) {  // false if the story would be too long
    if (story.text.size() + text.size() > max_bytes) return false;
    story.text += text;
    return true;
  }
  bool say(const std::string& sentence) {
    const bool line_start = story.text.empty() || story.text.back() == '\n';
    if (!add((line_start ? "" : " ") + sentence)) return false;
    sentences++;
    return true;
  }
  // Somebody is elsewhere now, and so is what they hold. told: a sentence has just said so.
  void move(size_t who, size_t place, bool told) {
    Person& p = people[who];
    if (!told) p.trail.clear();  // nobody can say for sure where they were in between
    p.trail.push_back(place);
    p.told = told ? sentences : 0;
    p.asked = p.asked_before = false;
    for (Thing& t : things) {
      if (t.holder != who) continue;
      if (!known(t.trail) || t.trail.back() != place) t.trail.push_back(place);
      t.carried = true;
      t.moved = sentences;
      t.asked = t.asked_before = false;
    }
  }

  // One sentence about something that can happen now; false if there is no room for it.
  bool happen() {
    for (;;) {
      const size_t event = below(8), who = below(people.size()), other = below(people.size());
      Person& p = people[who];
      Thing& t = things[below(things.size())];
      const size_t place = below(NAMES);
      const std::string name = PEOPLE[p.name], thing = THINGS[t.name];
      if (event < 3) {
        if (known(p.trail) && p.trail.back() == place) continue;
        if (!say(name + " went to the " + PLACES[place] + ".")) return false;
        move(who, place, true);
        named_places.push_back(PLACES[place]);
      } else if (event < 5) {
        if ((t.holder != NOBODY && t.holder != who) || (known(t.trail) && t.trail.back() == place)) continue;
        if (!say(name + " put the " + thing + " in the " + PLACES[place] + ".")) return false;
        t.holder = NOBODY;
        t.carried = t.asked = t.asked_before = false;
        t.trail.push_back(place);
        t.told = sentences;
        move(who, place, false);
        named_places.push_back(PLACES[place]);
      } else if (event < 7) {
        if (t.holder != NOBODY || !may_meet(p.trail, t.trail)) continue;
        if (!say(name + " took the " + thing + ".")) return false;
        if (known(t.trail) && !known(p.trail)) move(who, t.trail.back(), false);
        else if (known(p.trail) && !known(t.trail)) t.trail.push_back(p.trail.back());
        t.holder = who;
        t.told_holder = sentences;
        t.carried = t.asked_holder = false;
      } else {
        Person& q = people[other];
        if (t.holder != who || other == who || !may_meet(p.trail, q.trail)) continue;
        if (!say(name + " gave the " + thing + " to " + PEOPLE[q.name] + ".")) return false;
        if (known(p.trail) && !known(q.trail)) move(other, p.trail.back(), false);
        else if (known(q.trail) && !known(p.trail)) move(who, q.trail.back(), false);
        t.holder = other;
        t.told_holder = sentences;
        t.carried = t.asked_holder = false;
        named_people.push_back(name);
        named_people.push_back(PEOPLE[q.name]);
        return true;
      }
      named_people.push_back(name);
      return true;
    }
  }

  // ---- what is asked
  // Whether "before the barn" means one time only.
  static bool clear_before(const std::vector<size_t>& trail) {
    return trail.size() >= 2 && std::count(trail.begin(), trail.end(), trail.back()) == 1;
  }
  std::vector<Candidate> candidates() {
    std::vector<Candidate> all;
    const auto consider = [&](StoryKind kind, const std::string& question, const char* answer, bool& asked) {
      if (!asked) all.push_back({kind, question, answer, &asked});
    };
    // told: the sentence that says it in so many words.
    const auto unless_just = [&](StoryKind kind, size_t told) {
      return told == sentences ? StoryKind::just_told : kind;
    };
    const auto where = [&](StoryKind kind, const std::string& what, const std::vector<size_t>& trail, bool& asked) {
      consider(kind, "Where is " + what + "? In the ", PLACES[trail.back()], asked);
    };
    const auto before = [&](const std::string& what, const std::vector<size_t>& trail, bool& asked) {
      if (!clear_before(trail)) return;
      consider(StoryKind::before, "Where was " + what + " before the " + PLACES[trail.back()] + "? In the ",
               PLACES[trail[trail.size() - 2]], asked);
    };
    for (Person& p : people) {
      if (p.told > 0) where(unless_just(StoryKind::where_person, p.told), PEOPLE[p.name], p.trail, p.asked);
      before(PEOPLE[p.name], p.trail, p.asked_before);
    }
    for (Thing& t : things) {
      const std::string name = std::string("the ") + THINGS[t.name];
      if (t.holder != NOBODY)
        consider(unless_just(StoryKind::who_has, t.told_holder), "Who has " + name + "? ",
                 PEOPLE[people[t.holder].name], t.asked_holder);
      if (t.holder != NOBODY && t.carried && t.moved < sentences)
        where(StoryKind::carried, name, t.trail, t.asked);
      if (t.holder == NOBODY && known(t.trail))
        where(unless_just(StoryKind::where_thing, t.told), name, t.trail, t.asked);
      before(name, t.trail, t.asked_before);
    }
    return all;
  }

  // Asks one question that has an answer, if there is any; false if there is no room for it.
  bool ask() {
    std::vector<Candidate> all = candidates();
    if (all.empty()) return true;
    // Each kind that can be asked is as likely as the others: else the rare ones would be rarer still.
    std::vector<StoryKind> kinds;
    for (const Candidate& c : all)
      if (std::find(kinds.begin(), kinds.end(), c.kind) == kinds.end()) kinds.push_back(c.kind);
    const StoryKind kind = kinds[below(kinds.size())];
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return c.kind != kind; }), all.end());
    const Candidate& chosen = all[below(all.size())];

    const bool person = chosen.question.compare(0, 3, "Who") == 0;
    std::string latest;
    for (const std::string& name : person ? named_people : named_places)
      if (chosen.question.find(name) == std::string::npos) latest = name;
    const bool line_start = story.text.back() == '\n';
    const std::string question = (line_start ? "" : "\n") + chosen.question;
    const size_t begin = 1 + story.text.size() + question.size();  // 1: the end-of-text token in front
    if (!add(question + chosen.answer + ".\n")) return false;
    story.questions.push_back({kind, begin, begin + chosen.answer.size(), chosen.answer, latest});
    (person ? named_people : named_places).push_back(chosen.answer);
    *chosen.asked = true;
    return true;
  }
};

// ---- the corpus ----------------------------------------------------------------------------------------
// Story `number` (0 to 2^61 - 1) of a split, at most max_tokens long, end-of-text included. max_tokens is at
// least 64, which leaves room for a question.
inline Story tell_story(StorySplit split, uint64_t number, size_t max_tokens) {
  for (uint64_t attempt = 0;; attempt++) {
    Story story = StoryTeller(number << 2 | uint64_t(split), attempt, max_tokens - 1).tell();
    if (story.questions.empty()) continue;
    const uint32_t hash = sha256_prefix(story.text) % 100;
    if ((hash < 90 ? StorySplit::train : hash < 95 ? StorySplit::val : StorySplit::test) == split) return story;
  }
}

// The tokens of stories 0, 1, 2, ... of a split, one after the other: at least min_tokens, whole stories.
inline std::vector<uint16_t> story_tokens(StorySplit split, size_t min_tokens, size_t max_story_tokens) {
  std::vector<uint16_t> all;
  for (uint64_t number = 0; all.size() < min_tokens; number++)
    for (int id : tell_story(split, number, max_story_tokens).tokens()) all.push_back(uint16_t(id));
  return all;
}

// ---- marking -------------------------------------------------------------------------------------------
// Right answers by kind, beside what two readers get who do not look back: one who always gives the answer that
// is right most often for that kind of question, and one who gives the last name of the right sort.
class StoryMarks {
 public:
  struct Row { size_t asked = 0, right = 0, guessed = 0, latest = 0; };

  void add(const StoryQuestion& question, bool right) {
    Kind& kind = kinds[size_t(question.kind)];
    kind.row.asked++;
    kind.row.right += right;
    kind.row.latest += question.latest == question.answer;
    kind.count[question.answer]++;
  }
  Row row(StoryKind kind) const {
    Row row = kinds[size_t(kind)].row;
    for (const auto& answer : kinds[size_t(kind)].count) row.guessed = std::max(row.guessed, answer.second);
    return row;
  }
  Row total() const {
    Row sum;
    for (size_t k = 0; k < NUM_STORY_KINDS; k++) {
      const Row one = row(StoryKind(k));
      sum.asked += one.asked, sum.right += one.right, sum.guessed += one.guessed, sum.latest += one.latest;
    }
    return sum;
  }

 private:
  struct Kind {
    Row row;
    std::map<std::string, size_t> count;  // of each answer
  };
  Kind kinds[NUM_STORY_KINDS];
};
