// test_stories.cpp - the built-in stories, read back by a reader who knows nothing of how they were made.
#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include "data/stories.h"
#include "tests/check.h"

constexpr size_t LENGTH = 160, MANY = 3000;
constexpr const char* GOLDEN =  // story 0: a change of the generator changes everybody's data
    "Ann took the pen. Ann took the fan. Bob went to Lima.\nWhere is Bob? Lima.\nWho has the pen? Ann.\n"
    "Ann went to York.\nWho has the fan? Ann.\n";
// A reader who always gives the last name of the right sort: right nearly always about the last sentence
// (kind 0), not elsewhere.
constexpr double MOST_LATEST[NUM_STORY_KINDS] = {1, 0.5, 0.35, 0.45, 0.6};
const StorySplit SPLITS[] = {StorySplit::train, StorySplit::val, StorySplit::test};

// ---- a reader ------------------------------------------------------------------------------------------
// Reads sentences one after the other, keeps track of the world they tell of, and answers questions about it.
// It works from the words alone. `broken` says what cannot be so: somebody takes what lies elsewhere, gives
// what they do not have.
struct Reader {
  std::map<std::string, std::string> holder;  // of a thing
  std::map<std::string, std::string> place;   // of a person or a thing
  std::string broken;

  static std::vector<std::string> words(const std::string& sentence) {
    std::istringstream stream(sentence);
    std::vector<std::string> all;
    for (std::string word; stream >> word;) all.push_back(word.substr(0, word.find_first_of(".?")));
    return all;
  }
  void go(const std::string& who, const std::string& where) {
    place[who] = where;
    for (const auto& one : holder)
      if (one.second == who) place[one.first] = where;
  }
  // Two who meet are in one place, which one of them may tell.
  void meet(const std::string& a, const std::string& b, const std::string& sentence) {
    const std::string at_a = place[a], at_b = place[b];
    if (at_a.empty() && !at_b.empty()) go(a, at_b);
    if (at_b.empty() && !at_a.empty()) go(b, at_a);
    if (!at_a.empty() && !at_b.empty() && at_a != at_b) broken = sentence;
  }
  void read(const std::string& sentence) {
    const std::vector<std::string> w = words(sentence);
    const std::string who = w[0], verb = w[1];
    if (verb == "went" && w.size() == 4) {
      if (place[who] == w[3]) broken = sentence;
      go(who, w[3]);
    } else if (verb == "left" && w.size() == 6) {
      if ((!holder[w[3]].empty() && holder[w[3]] != who) || place[w[3]] == w[5]) broken = sentence;
      holder[w[3]] = "";
      go(who, w[5]);
      place[w[3]] = w[5];
    } else if (verb == "took" && w.size() == 4) {
      if (!holder[w[3]].empty()) broken = sentence;
      meet(who, w[3], sentence);
      holder[w[3]] = who;
    } else if (verb == "gave" && w.size() == 6) {
      if (holder[w[3]] != who || w[5] == who) broken = sentence;
      meet(who, w[5], sentence);
      holder[w[3]] = w[5];
    } else {
      broken = "not understood: " + sentence;
    }
  }
  std::string answer(const std::string& question) {
    const std::vector<std::string> w = words(question);
    return w[0] == "Who" ? holder[w[3]] : place[w[2] == "the" ? w[3] : w[2]];  // Where is (the) X
  }
};

struct Line {
  std::string text;
  bool question;
  size_t begin;
};  // begin: of the text in the story

std::vector<Line> sentences_of(const std::string& story) {
  std::vector<Line> all;
  size_t from = 0;
  while (from < story.size()) {
    const size_t line_end = story.find('\n', from);
    const bool question = story.compare(from, 2, "Wh") == 0;
    size_t end = question ? line_end : story.find('.', from) + 1;
    all.push_back({story.substr(from, end - from), question, from});
    from = end + 1;  // the blank or the line break
  }
  return all;
}

// The number of the last sentence without which the answer would be another, counted back from the question:
// 1 is the last sentence. 0: no single one decides.
size_t distance(const std::vector<std::string>& facts, const std::string& question) {
  Reader whole;
  for (const std::string& fact : facts) whole.read(fact);
  const std::string answer = whole.answer(question);
  for (size_t back = 1; back <= facts.size(); back++) {
    Reader without;
    for (size_t i = 0; i < facts.size(); i++)
      if (i != facts.size() - back) without.read(facts[i]);
    if (without.answer(question) != answer) return back;
  }
  return 0;
}

void test_reading() {
  TEST("every question is answered rightly by a reader of the words alone, and no story contradicts itself");
  size_t asked = 0, first_kind_near = 0, first_kind = 0, others_near = 0;
  for (StorySplit split : SPLITS)
    for (size_t n = 0; n < MANY; n++) {
      const Story story = tell_story(split, n, n % 2 ? LENGTH : 256);
      Reader reader;
      std::vector<std::string> facts;
      size_t q = 0;
      for (const Line& line : sentences_of(story.text)) {
        if (!line.question) {
          reader.read(line.text);
          facts.push_back(line.text);
          continue;
        }
        const size_t mark = line.text.find('?');
        if (!CHECK(q < story.questions.size() && mark != std::string::npos)) return;
        const StoryQuestion& question = story.questions[q++];
        const std::string asked_text = line.text.substr(0, mark + 1), answer = reader.answer(asked_text);
        CHECK_EQ(question.answer, answer);
        CHECK_EQ(line.text.substr(mark + 2), answer + ".");
        asked++;
        const bool near = distance(facts, asked_text) == 1;
        if (question.kind == StoryKind::just_told)
          first_kind++, first_kind_near += near;
        else
          others_near += near;
      }
      CHECK_EQ(q, story.questions.size());
      CHECK_EQ(reader.broken, std::string());
    }
  printf("     %zu questions in %zu stories\n", asked, 3 * MANY);
  CHECK(asked > 3 * MANY);

  TEST("the sentence that decides is the last one for questions of the first kind, and for no other");
  printf("     %zu of %zu of the first kind, %zu of the rest\n", first_kind_near, first_kind, others_near);
  CHECK_EQ(others_near, size_t(0));
  CHECK(first_kind > MANY);
  CHECK_EQ(first_kind_near, first_kind);
}

void test_shape() {
  TEST("stories are ASCII lines of at most the length asked for, answers are where they are said to be");
  size_t longest = 0, bytes = 0;
  for (size_t length : {size_t(64), size_t(100), LENGTH, size_t(256), size_t(1000)})
    for (size_t n = 0; n < 300; n++) {
      const Story story = tell_story(StorySplit::train, n, length);
      const std::vector<int> tokens = story.tokens();
      CHECK(tokens.size() <= length && tokens.size() == story.text.size() + 1);
      CHECK_EQ(tokens[0], 256);
      CHECK(!story.questions.empty() && story.text.back() == '\n');
      for (char c : story.text) CHECK(c == '\n' || (c >= ' ' && c <= '~'));
      CHECK(story.text.find("  ") == std::string::npos && story.text.find("\n\n") == std::string::npos);
      size_t last = 0;
      for (const StoryQuestion& q : story.questions) {
        std::string answer;
        for (size_t t = q.begin; t < q.end; t++) answer += char(tokens[t]);
        CHECK_EQ(answer, q.answer);
        CHECK(q.begin > last && tokens[q.begin - 1] == ' ');
        CHECK(tokens[q.end] == '.' && tokens[q.end + 1] == '\n');
        last = q.end;
      }
      if (length == LENGTH) longest = std::max(longest, tokens.size()), bytes += tokens.size();
    }
  printf("     length %zu: longest %zu, mean %.1f tokens\n", LENGTH, longest, double(bytes) / 300);
  CHECK(longest > LENGTH - 25);

  TEST("a story is a function of its number, its split and the length, and of nothing else");
  CHECK_EQ(tell_story(StorySplit::train, 0, LENGTH).text, std::string(GOLDEN));
  std::set<std::string> different;
  for (StorySplit split : SPLITS)
    for (uint64_t number : {uint64_t(0), uint64_t(1), uint64_t(1) << 40, uint64_t(3) << 40}) {
      const std::string once = tell_story(split, number, LENGTH).text;
      tell_story(StorySplit::val, 5, 100);
      CHECK_EQ(tell_story(split, number, LENGTH).text, once);
      different.insert(once);
    }
  CHECK_EQ(different.size(), size_t(12));
}

void test_splits() {
  TEST("no held-out story is a training story, no test story a validation story");
  std::map<std::string, StorySplit> split_of;
  std::map<StorySplit, size_t> count;
  for (StorySplit split : SPLITS)
    for (size_t n = 0; n < (split == StorySplit::train ? 30000 : 5000); n++) {
      const std::string text = tell_story(split, n, LENGTH).text;
      const auto added = split_of.emplace(text, split);
      CHECK(added.first->second == split);
      count[split]++;
    }
  printf("     %zu training, %zu validation, %zu test stories; %zu different texts\n", count[SPLITS[0]],
         count[SPLITS[1]], count[SPLITS[2]], split_of.size());

  TEST("story_tokens: one story after the other, each in a window of its own, as many as asked for");
  const std::vector<uint16_t> tokens = story_tokens(StorySplit::val, 5000, LENGTH);
  CHECK_EQ(tokens.size(), (5000 / LENGTH + 1) * LENGTH);
  for (size_t n = 0; (n + 1) * LENGTH < tokens.size(); n++) {  // the last target is the next story's first
    std::vector<int> inputs(LENGTH), targets(LENGTH);
    tell_story(StorySplit::val, n, LENGTH).window(LENGTH, inputs.data(), targets.data());
    CHECK(std::equal(inputs.begin(), inputs.end(), tokens.begin() + n * LENGTH));
    CHECK(std::equal(targets.begin(), targets.end(), tokens.begin() + n * LENGTH + 1));
  }
}

void test_guessing() {
  TEST("every kind is asked, and answers cannot be guessed: not from the kind, not from the question's words");
  constexpr double CHANCE = 1.0 / 6;
  StoryMarks marks;
  std::map<std::string, std::map<std::string, size_t>> by_question;  // how often each answer is right
  for (size_t n = 0; n < 20000; n++) {
    const Story story = tell_story(StorySplit::train, n, LENGTH);
    for (const StoryQuestion& q : story.questions) {
      marks.add(q, true);
      const size_t line = story.text.rfind('\n', q.begin - 2);
      const size_t from = line == std::string::npos ? 0 : line + 1;
      by_question[story.text.substr(from, story.text.find('?', from) - from)][q.answer]++;
    }
  }
  const StoryMarks::Row total = marks.total();
  for (size_t k = 0; k < NUM_STORY_KINDS; k++) {
    const StoryMarks::Row row = marks.row(StoryKind(k));
    const double n = double(row.asked), guess = double(row.guessed) / n;
    printf("     %-26s %6zu asked, best guess %.3f, latest name %.3f\n", STORY_KIND_NAMES[k], row.asked, guess,
           double(row.latest) / n);
    CHECK(n > 0.01 * double(total.asked));
    // Six answers, equally likely: the most frequent of them stays within chance of 1/6.
    CHECK(guess < CHANCE + 4 * std::sqrt(CHANCE * (1 - CHANCE) / n));
    CHECK(double(row.latest) / n <= MOST_LATEST[k]);
  }
  const StoryMarks::Row back = marks.total(StoryKind::where_person);
  printf("     one must look back for %.0f%%; there the latest name is right %.3f of the time\n",
         100 * double(back.asked) / double(total.asked), double(back.latest) / double(back.asked));
  CHECK(double(back.asked) > 0.6 * double(total.asked) && double(back.latest) < 0.45 * double(back.asked));
  double worst = 0;
  size_t different = 0;
  for (const auto& question : by_question) {
    double n = 0, most = 0;
    for (const auto& answer : question.second)
      n += double(answer.second), most = std::max(most, double(answer.second));
    if (n < 100) continue;
    different++;
    worst = std::max(worst, (most / n - CHANCE) / std::sqrt(CHANCE * (1 - CHANCE) / n));
  }
  printf("     %zu wordings: the best answer to each exceeds 1/6 by %.1f standard deviations at most\n",
         different, worst);
  CHECK(different == 18 && worst < 5);
}

void test_marks() {
  TEST("marking counts by kind: right answers, the most frequent one, the last name");
  StoryMarks marks;
  const auto add = [&](StoryKind kind, const char* answer, const char* latest, bool right) {
    marks.add({kind, 0, 0, answer, latest}, right);
  };
  add(StoryKind::who_has, "Ann", "Ann", true);
  add(StoryKind::who_has, "Ann", "Bob", false);
  add(StoryKind::who_has, "Bob", "Ann", true);
  add(StoryKind::just_told, "Rome", "Oslo", false);
  const StoryMarks::Row who = marks.row(StoryKind::who_has), told = marks.row(StoryKind::just_told);
  const StoryMarks::Row all = marks.total(), back = marks.total(StoryKind::where_person);
  CHECK(who.asked == 3 && who.right == 2 && who.guessed == 2 && who.latest == 1);
  CHECK(told.asked == 1 && told.right == 0 && told.guessed == 1 && told.latest == 0);
  CHECK(all.asked == 4 && all.right == 2 && all.guessed == 3 && all.latest == 1);
  CHECK(back.asked == 3 && back.right == 2 && back.guessed == 2 && back.latest == 1);
  CHECK(marks.row(StoryKind::carried).asked == 0);
}

void test_hash() {
  TEST("sha256_prefix: the published examples");
  CHECK_EQ(sha256_prefix(""), 0xe3b0c442u);
  CHECK_EQ(sha256_prefix("abc"), 0xba7816bfu);
  CHECK_EQ(sha256_prefix("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"), 0x248d6a61u);
  CHECK_EQ(sha256_prefix(std::string(1000000, 'a')), 0xcdc76e5cu);
}

int main() {
  test_reading();
  test_shape();
  test_splits();
  test_guessing();
  test_marks();
  test_hash();
  return finish();
}
