"""A solution of the reader's part of each lab."""

SOLUTIONS = {
    "1_select": """\
def select(pool, n_rsrv, max_bs, n_slots):
    batch = []
    for request in sorted((each for each in pool if each.state != "RUNNING"), key=lambda each: each.arrival):
        if len(batch) == max_bs:
            break
        if request.state == "INITIATION":
            if n_rsrv + request.max_tokens > n_slots:
                break
            n_rsrv += request.max_tokens
        batch.append(request)
    return batch, n_rsrv
""",
    "2_selective_batching": """\
def attend(q, k, v, start):
    merged = []
    for place, query in enumerate(q, start):
        scores = [sum(map(float.__mul__, query, key)) / math.sqrt(DIM) for key in k[: place + 1]]
        weights = [math.exp(score - max(scores)) for score in scores]
        sums = [sum(map(float.__mul__, weights, column)) for column in zip(*v[: place + 1])]
        merged.append([each / sum(weights) for each in sums])
    return merged


def selective(queries, members):
    merged = []
    for name, start, size in members:
        part = queries[len(merged) : len(merged) + size]
        merged += attend(part, keys[name], values[name], start)
    return merged
""",
    "3_chunks": """\
class Chunks:

    api, reads, may_starve = API, frozenset(), True

    def decide(self, view):
        spare, run, rows, budget = view.free_pages, [], view.free_rows, view.token_budget
        for job in view.residents:
            spare = spare - need(view, job)
        for job in [*sorted(view.residents, key=lambda job: job.num_left > 1), *view.waiting]:
            size = min(job.num_left, budget)
            if not size or len(run) == view.max_batch:
                continue
            if not job.is_resident:
                if not rows or need(view, job) > spare:
                    break
                rows, spare = rows - 1, spare - need(view, job)
            run.append((job, size))
            budget -= size
        return Decision(run)

    def started(self, job, num_tokens):
        pass

    def ended(self, job):
        pass
""",
    "4_feedback": """\
class Feedback:

    api, preempts, is_static = API, True, False

    def key(self, job, now):
        return ((job.num_generated // 16).bit_length(),)
""",
    "5_pipeline": """\
def end_times(durations, num_stages, in_flight):
    found = []
    for index, seconds in enumerate(durations):
        free = found[-1] if found else [0.0] * num_stages
        end = found[index - in_flight][-1] if index >= in_flight else 0.0
        found.append([])
        for stage in range(num_stages):
            end = max(end, free[stage]) + seconds
            found[-1].append(end)
    return found
""",
}
