// stories.h - a story world that makes its own training text, and questions to mark.
//
//   Ann took the cup. Ann went to Rome. Bob went to Oslo.
//   Where is the cup? Rome.
//
// People go to places, leave things there, take them along, hand them over; in between, somebody asks. No
// question gives its answer away: one has to look back for the sentence that decides, past others about other
// people and things, and sometimes to put two together. So learning shows as right answers, not only as a
// falling loss. All names of one sort differ in their first letter: there a reader of bytes has to decide.
//
// Story n of a split is a pure function of n, the split and the length allowed. The text itself decides what
// split it may be in (the rule of text_to_shards), so no held-out story is ever a training story.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "data/sha256.h"        // sha256_prefix
#include "dev/common/errors.h"  // fatal, format
#include "dev/common/log.h"     // Event, Progress
#include "dev/common/report.h"  // print_lines
#include "dev/common/random.h"  // uniform
#include "dev/common/ranks.h"   // ranks, all_token_losses
#include "dev/common/shards.h"  // Data, TokenData

enum class StorySplit { train, val, test };

// What it takes to answer. All but the first have other sentences between the fact and the question.
enum class StoryKind { just_told, where_person, where_thing, who_has, carried };
constexpr size_t NUM_STORY_KINDS = 5;
constexpr const char* STORY_KIND_NAMES[] = {  // by enum value
    "told in the last sentence", "where someone is", "where a thing is", "who has a thing",
    "where a carried thing is"};

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
  // The same as one window of T inputs and T targets, filled up with end-of-text. Token t is the target at
  // t - 1.
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
    for (size_t name : choose(2 + below(2))) people.push_back({name});
    for (size_t name : choose(1 + below(2))) things.push_back({name});
    places = choose(3);
    size_t events = 2 + below(2);
    for (bool room = true; room; events = 1 + below(2)) {
      for (size_t n = events; room && n > 0; n--) room = happen();
      for (size_t n = 1 + below(3); n > 0; n--) ask();
    }
    // What is told after the last question helps to answer nothing.
    story.text.resize(story.questions.empty() ? 0 : story.questions.back().end - 1 + strlen(".\n"));
    return story;
  }

 private:
  static constexpr uint64_t SEED = 0x73746f7279;  // "story"
  static constexpr size_t NAMES = 6, NOBODY = NAMES, UNKNOWN = NAMES;
  static constexpr const char* PEOPLE[] = {"Ann", "Bob", "Cid", "Dan", "Eve", "Flo"};
  static constexpr const char* THINGS[] = {"cup", "fan", "key", "map", "pen", "toy"};
  static constexpr const char* PLACES[] = {"Lima", "Nice", "Oslo", "Pisa", "Rome", "York"};

  // Where somebody or something is. A sentence that says so has a number; 0: it follows from others only.
  struct Person {
    size_t name, place = UNKNOWN, told = 0;
    bool asked = false;  // since the last change
  };
  struct Thing {
    size_t name, place = UNKNOWN, holder = NOBODY, told = 0, told_holder = 0;
    size_t moved = 0;  // the sentence in which its holder took it along
    bool carried = false, asked = false, asked_holder = false;
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
  std::vector<size_t> places;  // of this story: few, so that looking back helps at any place named, not only
                               // in answers
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
  static bool may_meet(size_t a, size_t b) { return a == UNKNOWN || b == UNKNOWN || a == b; }

  bool say(const std::string& sentence) {  // false if there is no room for it
    const std::string blank = story.text.empty() || story.text.back() == '\n' ? "" : " ";
    if (story.text.size() + blank.size() + sentence.size() > max_bytes) return false;
    story.text += blank + sentence;
    sentences++;
    return true;
  }
  // Somebody is elsewhere now, and so is what they hold. told: a sentence has just said so.
  void move(size_t who, size_t place, bool told) {
    Person& p = people[who];
    p.place = place;
    p.told = told ? sentences : 0;
    p.asked = false;
    for (Thing& t : things) {
      if (t.holder != who) continue;
      t.place = place;
      t.carried = true;
      t.moved = sentences;
      t.asked = false;
    }
  }

  // One sentence about something that can happen now; false if there is no room for it.
  bool happen() {
    for (;;) {
      const size_t event = below(9), who = below(people.size()), other = below(people.size());
      Person& p = people[who];
      Thing& t = things[below(things.size())];
      const size_t place = places[below(places.size())];
      const std::string name = PEOPLE[p.name], thing = THINGS[t.name];
      if (event < 4) {
        if (p.place == place) continue;
        if (!say(name + " went to " + PLACES[place] + ".")) return false;
        move(who, place, true);
        named_places.push_back(PLACES[place]);
      } else if (event < 6) {
        if ((t.holder != NOBODY && t.holder != who) || t.place == place) continue;
        if (!say(name + " left the " + thing + " in " + PLACES[place] + ".")) return false;
        t.holder = NOBODY;
        t.carried = t.asked = false;
        t.place = place;
        t.told = sentences;
        move(who, place, false);
        named_places.push_back(PLACES[place]);
      } else if (event < 8) {
        if (t.holder != NOBODY || !may_meet(p.place, t.place)) continue;
        if (!say(name + " took the " + thing + ".")) return false;
        if (p.place == UNKNOWN && t.place != UNKNOWN)
          move(who, t.place, false);
        else
          t.place = p.place;
        t.holder = who;
        t.told_holder = sentences;
        t.carried = t.asked_holder = false;
      } else {
        Person& q = people[other];
        if (t.holder != who || other == who || !may_meet(p.place, q.place)) continue;
        if (!say(name + " gave the " + thing + " to " + PEOPLE[q.name] + ".")) return false;
        if (q.place == UNKNOWN && p.place != UNKNOWN) move(other, p.place, false);
        if (p.place == UNKNOWN && q.place != UNKNOWN) move(who, q.place, false);
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
  std::vector<Candidate> candidates() {
    std::vector<Candidate> all;
    // told: the sentence that says it in so many words.
    const auto consider = [&](StoryKind kind, size_t told, const std::string& question, const char* answer,
                              bool& asked) {
      if (!asked) all.push_back({told == sentences ? StoryKind::just_told : kind, question, answer, &asked});
    };
    for (Person& p : people) {
      const std::string name = std::string(PEOPLE[p.name]) + "? ";
      if (p.told > 0) consider(StoryKind::where_person, p.told, "Where is " + name, PLACES[p.place], p.asked);
    }
    for (Thing& t : things) {
      const std::string name = std::string("the ") + THINGS[t.name] + "? ";
      if (t.holder != NOBODY) {
        const char* holder = PEOPLE[people[t.holder].name];
        consider(StoryKind::who_has, t.told_holder, "Who has " + name, holder, t.asked_holder);
      }
      if (t.holder != NOBODY && t.carried && t.moved < sentences)
        consider(StoryKind::carried, 0, "Where is " + name, PLACES[t.place], t.asked);
      if (t.holder == NOBODY && t.place != UNKNOWN)
        consider(StoryKind::where_thing, t.told, "Where is " + name, PLACES[t.place], t.asked);
    }
    return all;
  }

  // Asks one question that has an answer and for which there is room, if there is any.
  void ask() {
    std::vector<Candidate> all = candidates();
    // The last sentence is asked about now and then: that is how copying is learned, and easy once it is.
    const bool any = below(3) == 0;
    const size_t line_break = story.text.back() != '\n';
    const auto not_now = [&](const Candidate& c) {
      return (c.kind == StoryKind::just_told && !any) ||
             story.text.size() + line_break + c.question.size() + c.answer.size() + strlen(".\n") > max_bytes;
    };
    all.erase(std::remove_if(all.begin(), all.end(), not_now), all.end());
    if (all.empty()) return;
    // Each kind that can be asked is as likely as the others: else the rare ones would be rarer still.
    std::vector<StoryKind> kinds;
    for (const Candidate& c : all)
      if (std::find(kinds.begin(), kinds.end(), c.kind) == kinds.end()) kinds.push_back(c.kind);
    const StoryKind kind = kinds[below(kinds.size())];
    const auto other_kind = [&](const Candidate& c) { return c.kind != kind; };
    all.erase(std::remove_if(all.begin(), all.end(), other_kind), all.end());
    const Candidate& chosen = all[below(all.size())];

    std::vector<std::string>& named = chosen.question.compare(0, 3, "Who") == 0 ? named_people : named_places;
    const std::string latest = named.empty() ? "" : named.back();
    if (line_break) story.text += "\n";
    story.text += chosen.question;
    const size_t begin = 1 + story.text.size();  // 1: the end-of-text token in front
    story.text += chosen.answer + ".\n";
    story.questions.push_back({kind, begin, begin + chosen.answer.size(), chosen.answer, latest});
    named.push_back(chosen.answer);
    *chosen.asked = true;
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

// The tokens of stories 0, 1, 2, ... of a split: at least min_tokens. Each takes T of them, filled up with
// end-of-text, so that every window of T that a run trains on is one story from its beginning to its end.
inline std::vector<uint16_t> story_tokens(StorySplit split, size_t min_tokens, size_t T) {
  std::vector<uint16_t> all;
  for (uint64_t number = 0; all.size() < min_tokens; number++) {
    for (int id : tell_story(split, number, T).tokens()) all.push_back(uint16_t(id));
    all.resize((number + 1) * T, all[0]);
  }
  return all;
}

// The splits of a run on stories. How many tokens there are is fixed, so that a run made longer goes on with
// the same data.
constexpr size_t STORY_TRAIN_TOKENS = 8 << 20, STORY_VAL_TOKENS = 1 << 17, STORY_MIN_CONTEXT = 64;

inline Data story_data(const Config& config) {
  if (config.T < STORY_MIN_CONTEXT)
    fatal(EXIT_USAGE,
          "--context: got %zu, expected at least %zu: the built-in stories need room for a question", config.T,
          STORY_MIN_CONTEXT);
  const auto split = [&](StorySplit which, const char* name, size_t tokens) {
    TokenData data = TokenData::from_tokens(story_tokens(which, tokens, config.T), name, config.V);
    data.require_window(config.T);
    return data;
  };
  Data data;
  data.stories = true;
  data.train = split(StorySplit::train, "built-in stories", STORY_TRAIN_TOKENS);
  data.val = split(StorySplit::val, "held-out stories", STORY_VAL_TOKENS);
  return data;
}

// ---- marking -------------------------------------------------------------------------------------------
// Right answers by kind, beside what two readers get who do not look back: one who always gives the answer that
// is right most often for that kind of question, and one who gives the last name of the right sort.
class StoryMarks {
 public:
  struct Row {
    size_t asked = 0, right = 0, guessed = 0, latest = 0;
  };

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
  // Of that kind and those after it: total(StoryKind::where_person) leaves out what the last sentence tells.
  Row total(StoryKind first = StoryKind::just_told) const {
    Row sum;
    for (size_t k = size_t(first); k < NUM_STORY_KINDS; k++) {
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

// Right answers in held-out stories, by kind of question, beside what readers get who do not look back.
inline std::string answers_table(const StoryMarks& marks, size_t num_stories) {
  std::string text = format("%-34sasked    right   best guess   latest name\n",
                            format("answers in %zu held-out stories", num_stories).c_str());
  const auto add = [&](const char* name, const StoryMarks::Row& row) {
    const double percent = 100 / double(std::max<size_t>(row.asked, 1));
    text += format("  %-26s%7zu%8.0f%%%13.0f%%%14.0f%%\n", name, row.asked, double(row.right) * percent,
                   double(row.guessed) * percent, double(row.latest) * percent);
  };
  for (size_t kind = 0; kind < NUM_STORY_KINDS; kind++) add(STORY_KIND_NAMES[kind], marks.row(StoryKind(kind)));
  add("looking back", marks.total(StoryKind::where_person));
  add("together", marks.total());
  return text;
}
// The same in short, while the run goes on:
// "answers step 100 | told in the last sentence 97% of 61 | looking back 55% of 205, latest name 36%"
inline std::string answers_line(size_t step, const StoryMarks& marks) {
  const StoryMarks::Row told = marks.row(StoryKind::just_told), back = marks.total(StoryKind::where_person);
  const auto percent = [](size_t n, size_t of) { return 100 * double(n) / double(std::max<size_t>(of, 1)); };
  return format("answers step %zu | %s %.0f%% of %zu | looking back %.0f%% of %zu, latest name %.0f%%\n", step,
                STORY_KIND_NAMES[0], percent(told.right, told.asked), told.asked,
                percent(back.right, back.asked), back.asked, percent(back.latest, back.asked));
}

// Right answers, the model's and those of the two readers who do not look back.
inline Event answers_event(const Progress& at, const char* which, const StoryMarks::Row& row) {
  Event event("val");
  return event.add("step", at.step)
      .add("tokens", at.tokens)
      .add("split", which)
      .add("count", row.asked)
      .add("right", row.right)
      .add("guessed", row.guessed)
      .add("latest", row.latest);
}

// Marks the questions of held-out stories, one story a row: an answer counts if its probability, all its bytes
// together, is above one half.
template <class Model>
StoryMarks mark_answers(Model& m, size_t num_stories) {
  const size_t T = m.T;
  StoryMarks marks;
  std::vector<int> tokens(m.B * T), targets(m.B * T);
  for (size_t n0 = 0; n0 < num_stories; n0 += ranks.size * m.B) {
    std::vector<Story> stories;  // of all ranks
    for (size_t n = n0; n < std::min(n0 + ranks.size * m.B, num_stories); n++)
      stories.push_back(tell_story(StorySplit::test, n, T));
    const size_t first = std::min(ranks.rank * m.B, stories.size());
    const size_t rows = std::min(m.B, stories.size() - first);
    for (size_t b = 0; b < rows; b++) stories[first + b].window(T, &tokens[b * T], &targets[b * T]);
    const auto losses = all_token_losses(m, tokens, targets, rows);
    for (size_t b = 0; b < stories.size(); b++)
      for (const StoryQuestion& question : stories[b].questions) {
        double surprise = 0;  // -log of the answer's probability; token t is the target of row t - 1
        for (size_t t = question.begin; t < question.end; t++) surprise += double(losses[b * T + t - 1]);
        marks.add(question, std::exp(-surprise) > 0.5);
      }
  }
  return marks;
}

template <class Run>
void report_answers(Run& run, Log& log, size_t num_stories) {
  const StoryMarks marks = mark_answers(run.model, num_stories);
  const bool finished = run.step >= run.options.steps;
  print_lines(finished ? answers_table(marks, num_stories) : answers_line(run.step, marks));
  log.write(answers_event(run, "answers", marks.total()));
  log.write(answers_event(run, "answers looking back", marks.total(StoryKind::where_person)));
}
