/* test_project.c: the open project of docs/PROJECT.md, in its short path: a kit, the baseline and an improved entry judged,
 * a board; and a few entries that cheat; each of one story. `scripts/project.py hostile` has the others (CI). */
#include "tests.h"

const char *test_missing(const char *name) {
    (void)name;
    return !has_python() ? "the open project, since python3 is missing" : NULL;
}

static const char begin[] =
    "import project, project_hostile\n"
    "os.environ.update(PROJECT_STORIES='1', PROJECT_SEED='2')\n"
    "entry = json.load(open('docs/project/entry.json'))\n";

/* With the shares at 1, as they are without an entry, the judge's clock is that of `flexgen bench`. The policy is like the
 * baseline's, with larger batches, which take less to simulate. */
TEST(the_judges_clock_is_that_of_bench) {
    CU_ASSERT_EQUAL(
        python(begin,
               "percent, block = ['0.5', '99.5', '20', '80', '0', '100'], ['16', '4']\n"
               "words = [os.environ['PROJECT_JUDGE'], 'models/opt-tiny', 'models/opt-tiny/stories.txt', '1', '1', "
               "'docs/project/machine.json']\n"
               "found = json.loads(subprocess.check_output([*words, *percent, *block, 'zigzag', '1']))\n"
               "bench = ['bench', '--device', 'sim', '--hardware', 'docs/project/machine.json', '--model', 'opt-2.7b',\n"
               "         '--prompt-len', '128', '--gen-len', '64', '--num-prompts', '960', '--compress-weight', "
               "'--compress-cache',\n"
               "         '--cpu-cache-compute', '--gpu-batch-size', block[0], '--num-gpu-batches', block[1], '--percent', "
               "*percent]\n"
               "said = subprocess.check_output([os.environ['FLEXGEN_BIN'], *bench, '--json', '-'], "
               "stderr=subprocess.DEVNULL)\n"
               "same('%.2f' % found['token_s'], '%.2f' % json.loads(said)['throughput'])\n"
               "same((found['perplexity'], found['same']), (found['exact'], found['tokens']))\n"),
        0);
}

TEST(a_kit_has_the_files_of_the_baseline) {
    CU_ASSERT_EQUAL(python(begin,
                           "kit = os.path.join(dir, 'kit')\n"
                           "project.kit(kit)\n"
                           "files = {name: 'docs/project/' + name for name in os.listdir('docs/project')}\n"
                           "files.update({path: path for path in project.HEADERS}, **{'PROJECT.md': 'docs/PROJECT.md'})\n"
                           "found = [os.path.join(at, name) for at, _, names in os.walk(kit) for name in names]\n"
                           "same(sorted(os.path.relpath(path, kit) for path in found), sorted(files))\n"
                           "for name in files: same(project.read(os.path.join(kit, name)), project.read(files[name]))\n"
                           "same({'project.c', 'entry.json', 'project.h'} <= set(files), True)\n"),
                    0);
}

/* On one board, so that the baseline is judged once. token/s does not depend on the stories. Where it does not
 * matter which policy an entry has, it has larger batches, which take less to simulate. The cheat that takes long
 * to judge has its turn. Without namespaces entries that cheat could do harm. */
TEST(the_board_has_the_baseline_and_a_better_entry_and_none_that_cheats) {
    if (!test_takes(0)) setenv("LEFT_OUT", "hands over in /tmp/x", 1);
    CU_ASSERT_EQUAL(
        python(begin,
               "said = {'hands over in /tmp/x': 'the perplexity is', 'reads the texts': 'it ended before it was asked',\n"
               "        'hides a model': 'more than 32768 bytes', 'brings a clock': 'expected percent'}\n"
               "said.pop(os.environ.get('LEFT_OUT'), None)\n"
               "all = project_hostile.dishonest()\n"
               "cheats = {name: all[name] for name in said} if project.is_closed() else {}\n"
               "large = dict(entry, gpu_batch_size=16, num_gpu_batches=4)\n"
               "for name in set(cheats) & {'hands over in /tmp/x'}: cheats[name]['entry.json'] = json.dumps(large)\n"
               "better = project_hostile.honest()['coarser keys']\n"
               "rows, pages = project_hostile.course({'coarser keys': better, **cheats}, [('coarser keys', 60)])\n"
               "better, base = rows['coarser keys'], rows['(baseline)']\n"
               "same(base['score'], base['token/s'])\n"
               "same(better['token/s'] > 1.05 * base['token/s'] and better['cache'] < base['cache'], True)\n"
               "same(better['score'] == project.score_of(better['token/s'], 60) != better['token/s'], True)\n"
               "for text in pages.values(): same(('%.2f' % better['token/s']) in text, True)\n"
               "text = project.read('docs/PROJECT.md')\n"
               "for row in (base, better): same(('%.1f' % row['token/s']) in text, True)\n"
               "for name in cheats:\n"
               "    row = rows[name.replace('/', '_')]\n"
               "    same((name, 'token/s' in row, said[name] in row['note']), (name, False, True))\n"),
        0);
}

TEST(what_is_predicted_counts) {
    CU_ASSERT_EQUAL(python(begin,
                           "same([project.score_of(40, p) for p in (40, 30, 50, 1000, None)], [40, 37.5, 37.5, 30, 30])\n"
                           "path = os.path.join(dir, 'p.json')\n"
                           "for text, value in (('{\"token_s\": 41.5}', 41.5), ('{\"token_s\": -1}', None), "
                           "('{\"token_s\": true}', None),\n"
                           "                    ('[1]', None), ('{', None), ('{\"token_s\": NaN}', None), ('{\"token_s\": "
                           "\"9\"}', None)):\n"
                           "    with open(path, 'w') as f: f.write(text)\n"
                           "    same((text, project.predicted_of(path)), (text, value))\n"
                           "for name in ('', 'none.json'): same(project.predicted_of(os.path.join(dir, name)), None)\n"),
                    0);
}
