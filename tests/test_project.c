/* test_project.c: the open project of docs/PROJECT.md, in its short path: a kit, the baseline and an improved entry judged,
 * a board; and a few entries that cheat. `scripts/project.py hostile` has the others (CI). */
#include "tests.h"

const char *test_missing(const char *name) {
    (void)name;
    return system("python3 -c ''") ? "the open project, since python3 is missing" : NULL;
}

static int python(const char *lines) {
    const char *dir = temp_dir();
    const char begin[] =
        "import json, os, subprocess, sys\nsys.path.insert(0, 'scripts')\nimport project, project_hostile\n"
        "dir, judge = os.environ['DIR'], os.environ['PROJECT_JUDGE']\nos.environ['PROJECT_STORIES'] = '2'\n"
        "def same(found, expected):\n"
        "    if found != expected: sys.exit('expected %r, found %r' % (expected, found))\n";
    FILE *f = fopen(in_dir(dir, "lines.py"), "w");
    CHECK(f && fprintf(f, "%s%s", begin, lines) > 0 && !fclose(f));
    setenv("DIR", dir, 1);
    return system("python3 -B $DIR/lines.py");
}

/* With the shares at 1, as they are without an entry, the judge's clock is that of `flexgen bench`. */
TEST(the_judges_clock_is_that_of_bench) {
    CU_ASSERT_EQUAL(
        python("entry = json.load(open('docs/project/entry.json'))\n"
               "percent = [str(x) for x in entry['percent']]\n"
               "block = [str(entry['gpu_batch_size']), str(entry['num_gpu_batches'])]\n"
               "words = [judge, 'models/opt-tiny', 'models/opt-tiny/stories.txt', '1', '1', 'docs/project/machine.json']\n"
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

TEST(a_kit_is_the_baseline_and_the_board_has_its_row_and_a_better_one) {
    CU_ASSERT_EQUAL(
        python("project.kit(os.path.join(dir, 'kit'))\n"
               "kit = {name: project.read(os.path.join(dir, 'kit', name)) for name in ('project.c', 'entry.json')}\n"
               "entries = {'kit': kit, 'coarser keys': project_hostile.honest()['coarser keys']}\n"
               "rows, pages = project_hostile.course(entries, [('coarser keys', 60), ('kit', 0)])\n"
               "kit, better, base = rows['kit'], rows['coarser keys'], rows['(baseline)']\n"
               "for c in ('token/s', 'perplexity', 'cache', 'read'): same(kit[c], base[c])\n"
               "same(base['score'], base['token/s'])\n"
               "same(kit['score'], .75 * base['token/s'])\n"
               "same(better['token/s'] > 1.05 * base['token/s'] and better['cache'] < base['cache'], True)\n"
               "same(better['score'] == project.score_of(better['token/s'], 60) != better['token/s'], True)\n"
               "for text in pages.values(): same(('%.2f' % better['token/s']) in text, True)\n"
               "text = project.read('docs/PROJECT.md')\n"
               "for row in (base, better): same(('%.1f' % row['token/s']) in text, True)\n"),
        0);
}

TEST(entries_that_cheat_have_no_row) {
    CU_ASSERT_EQUAL(
        python("os.environ['PROJECT_STORIES'] = '1'\n"
               "if not project.is_closed(): sys.exit(0)\n"
               "all = project_hostile.dishonest()\n"
               "said = {'hands over in /tmp/x': 'the perplexity is', 'reads the texts': 'it ended before it was asked',\n"
               "        'hides a model': 'more than 32768 bytes', 'brings a clock': 'expected percent'}\n"
               "rows, _ = project_hostile.course({name: all[name] for name in said})\n"
               "for name in said:\n"
               "    row = rows[name.replace('/', '_')]\n"
               "    same((name, 'token/s' in row, said[name] in row['note']), (name, False, True))\n"),
        0);
}

TEST(what_is_predicted_counts) {
    CU_ASSERT_EQUAL(python("same([project.score_of(40, p) for p in (40, 30, 50, 1000, None)], [40, 37.5, 37.5, 30, 30])\n"
                           "path = os.path.join(dir, 'p.json')\n"
                           "for text, value in (('{\"token_s\": 41.5}', 41.5), ('{\"token_s\": -1}', None), "
                           "('{\"token_s\": true}', None),\n"
                           "                    ('[1]', None), ('{', None), ('{\"token_s\": NaN}', None), ('{\"token_s\": "
                           "\"9\"}', None)):\n"
                           "    with open(path, 'w') as f: f.write(text)\n"
                           "    same((text, project.predicted_of(path)), (text, value))\n"
                           "same(project.predicted_of(dir), None)\n"),
                    0);
}
