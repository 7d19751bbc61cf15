/* pages.c: pages of the KV cache: who has them, and which of them pass through staging.
 *
 * DIFFERS: the paper's cache of a batch has room for equally long sequences. Pages need no padding,
 * and when a sequence ends, its pages are reused. A page belongs to a batch, or to the free pages
 * of its flight: ops are ordered by batches, so each change of owner is told to depend.c. Read
 * next: pieces.c. */
#include "schedule.h"

// -------------------------------------------------------------------------------------------------
// Pools
// -------------------------------------------------------------------------------------------------

void pool_open(PagePool *pool, int first, int npages) {
    *pool = (PagePool){.first = first, .npages = npages, .taken = xcalloc(npages, 1)};
}

int pool_take(PagePool *pool) {
    bool *page = memchr(pool->taken + pool->hint, false, pool->npages - pool->hint);
    CHECK(page);
    *page = true;
    pool->used++;
    pool->hint = page - pool->taken + 1;
    pool->peak = imax(pool->peak, pool->hint);
    return pool->first + pool->hint - 1;
}

void pool_give(PagePool *pool, int page) {
    page -= pool->first;
    CHECK(page >= 0 && page < pool->npages && pool->taken[page]);
    pool->taken[page] = false;
    pool->used--;
    pool->hint = imin(pool->hint, page);
}

void pool_close(PagePool *pool) { free(pool->taken); }

// -------------------------------------------------------------------------------------------------
// The pages of a batch
// -------------------------------------------------------------------------------------------------

/* Returns the batch number that stands for this flight's free pages in the cells of the cache. */
static int free_pages_owner(const Flight *f) { return f->run->plan->batches + f->index; }

void order_new_owner(Flight *f, Tier tier, int owner, int before) {
    const Run *run = f->run;
    for (int j = 0; j < run->plan->config.l; j++)
        depend_join(run->poster->depend, cache_cell(run->plan, tier, owner, j),
                    cache_cell(run->plan, tier, before, j));
}

void grow_pages(Flight *f, Batch *b) {
    bool took[NTIERS] = {false};
    for (int r = 0; r < b->nseq; r++) {
        Sequence *q = b->seq[r];
        int npages = pages_for(q->s + q->generated, f->run->plan->policy.page_tokens);
        for (; q->npages < npages; q->npages++) {
            q->pages[q->npages] = pool_take(&f->pool[q->kv]);
            took[q->kv] = true;
        }
    }
    for (int t = 0; t < NTIERS; t++)
        if (took[t])
            order_new_owner(f, t, b->plan_place, free_pages_owner(f));
}

void give_back_pages(Flight *f, const Batch *b, Sequence *q) {
    while (q->npages)
        pool_give(&f->pool[q->kv], q->pages[--q->npages]);
    order_new_owner(f, q->kv, free_pages_owner(f), b->plan_place);
}

static int by_page(const void *a, const void *b) {
    return ((const Staged *)a)->page - ((const Staged *)b)->page;
}

/* Lists the pages of one tier that attention needs on another tier, in page order. Their places in
 * staging follow each other from `base` on; writes these into Tables.staged, and makes the route of
 * those that hold past tokens. */
static void list_staged_pages(Flight *f, Batch *b, Tier tier, int base) {
    const Run *run = f->run;
    int32_t *table = cpu_address(run->poster, b->cpu.staged);
    int n = 0, page_tokens = run->plan->policy.page_tokens;
    for (int r = 0; r < b->nseq; r++, table += run->plan->max_pages) {
        const Sequence *q = b->seq[r];
        int past = q->s + q->generated - 1; /* tokens of earlier sweeps */
        for (int e = 0; q->kv == tier && e < q->npages; e++)
            f->staged[n++] = (Staged){q->pages[e], e * page_tokens < past, &table[e]};
    }
    qsort(f->staged, n, sizeof *f->staged, by_page);
    for (int i = 0; i < n; i++) {
        const Staged *s = &f->staged[i];
        *s->entry = base + i;
        if (s->past)
            add_leg(&b->past[tier], i * page_tokens, s->page * page_tokens, page_tokens);
    }
    b->nstaged[tier] = n;
}

void stage_pages(Flight *f, Batch *b) {
    for (int t = 0; t < NTIERS; t++)
        b->nstaged[t] = b->past[t].n = 0;
    if (b->prefill)
        return;
    if (!f->run->plan->policy.delegated)
        list_staged_pages(f, b, TIER_CPU, 0);
    list_staged_pages(f, b, TIER_DISK, b->nstaged[TIER_CPU]);
}
