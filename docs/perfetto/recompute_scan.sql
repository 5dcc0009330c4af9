-- The plain count as a module for Perfetto's SQL: operators that only a forward pass has, inside
-- the backward pass and outside of it, by name. Open a trace of torch.profiler, paste this into
-- the query page, and end with: SELECT * FROM recompute_scan_counts;
--
-- It knows nothing of which operator is which one's recompute: `inside` of a checkpointed step is
-- as large as `outside`, and twice as large where checkpoints are doubled.

-- Ranges that autograd's engine opens, one around each node of the backward pass.
CREATE PERFETTO VIEW recompute_scan_engine AS
SELECT id FROM slice WHERE name GLOB 'autograd::engine::evaluate_function: *';

-- Calls of autograd functions: what has a node of its own name.
CREATE PERFETTO VIEW recompute_scan_function AS
SELECT s.id FROM slice AS s
WHERE s.name || 'Backward' IN (SELECT DISTINCT name FROM slice WHERE name GLOB '*Backward');

-- Forward work that no gradient's formula has: linear layers, convolutions, attention, norms.
CREATE PERFETTO VIEW recompute_scan_operator AS
SELECT s.id, s.name, s.parent_id,
  extract_arg(s.arg_set_id, 'args.Sequence number') AS sequence
FROM slice AS s
WHERE s.category = 'cpu_op'
  AND lower(s.name) NOT GLOB '*backward*'
  AND lower(s.name) NOT GLOB '*bwd*'
  AND (
    s.name IN ('aten::linear', 'aten::addmm')
    OR s.name GLOB 'aten::*layer_norm'
    OR s.name GLOB 'aten::*batch_norm'
    OR s.name GLOB 'aten::*group_norm'
    OR s.name GLOB 'aten::*instance_norm'
    OR s.name GLOB 'aten::*rms_norm'
    OR s.name GLOB 'aten::*_norm_legit*'
    OR s.name GLOB 'aten::*convolution*'
    OR s.name GLOB 'aten::*conv[0-9]*'
    OR s.name GLOB 'aten::*conv_*'
    OR lower(s.name) GLOB '*scaled_dot_product*'
    OR lower(s.name) GLOB '*attention*'
    OR lower(s.name) GLOB '*flash_attn*'
    OR lower(s.name) GLOB '*flashattn*'
    OR lower(s.name) GLOB '*fmha*'
    OR lower(s.name) GLOB '*xformers*'
  );

-- Each of them with all that holds it.
CREATE PERFETTO TABLE recompute_scan_placed AS
WITH RECURSIVE holder(id, above) AS (
  SELECT id, parent_id FROM recompute_scan_operator
  UNION ALL
  SELECT holder.id, slice.parent_id
  FROM holder JOIN slice ON slice.id = holder.above
)
SELECT o.id, o.name, o.sequence,
  EXISTS (SELECT 1 FROM holder AS h JOIN recompute_scan_engine AS e ON e.id = h.above
    WHERE h.id = o.id) AS inside,
  EXISTS (SELECT 1 FROM holder AS h JOIN recompute_scan_function AS f ON f.id = h.above
    WHERE h.id = o.id) AS in_function
FROM recompute_scan_operator AS o;

-- What ran without gradients is no training forward pass, unless a function's call holds it. A name
-- most of which has no number outside of the backward pass is taken whole: some operators never have.
CREATE PERFETTO VIEW recompute_scan_counts AS
WITH known AS (
  SELECT name, 2 * sum(sequence IS NOT NULL OR in_function) < count() AS whole
  FROM recompute_scan_placed
  WHERE NOT inside
  GROUP BY name
)
SELECT p.name, sum(NOT p.inside) AS outside, sum(p.inside) AS inside
FROM recompute_scan_placed AS p LEFT JOIN known AS k ON k.name = p.name
WHERE p.sequence IS NOT NULL OR p.in_function OR k.whole
GROUP BY p.name
ORDER BY outside DESC, p.name;
