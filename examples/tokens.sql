SELECT t.position, t.token, round(CAST(t.logprob AS numeric), 4) AS logprob, round(CAST(t.at_seconds AS numeric), 3) AS at_seconds
FROM completion_tokens AS t
JOIN results AS r ON r.batch_id = t.batch_id AND r."index" = t."index"
WHERE r.batch_id = (SELECT max(batch_id) FROM requests WHERE custom_id = 'capital-of-france')
  AND r.custom_id = 'capital-of-france'
ORDER BY t.position
