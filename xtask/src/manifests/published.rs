//! Kinds that are not Kubernetes' own, and the examples, by what their projects publish (`tests/schemas`).

use super::documents;
use crate::shell;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::fs;
use support::schema::Schemas;

const EXAMPLES: &str = "deploy/examples";
/// What is wrong with objects, each by name; of a kind that nobody has published, that.
pub(super) fn judge(objects: &[Value]) -> Vec<String> {
    let of = |object: &Value| {
        let findings = Schemas::published().findings(object);
        findings.into_iter().map(|finding| format!("{}: {finding}", super::title(object))).collect::<Vec<_>>()
    };
    objects.iter().flat_map(of).collect()
}

/// The examples, with the file each is in.
pub(super) fn examples() -> Result<Vec<(String, Value)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(shell::top().join(EXAMPLES))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let objects = documents(&fs::read_to_string(&path)?).with_context(|| name.clone())?;
        all.extend(objects.into_iter().map(|object| (name.clone(), object)));
    }
    ensure!(!all.is_empty(), "there are no examples in {EXAMPLES}");
    // So are those in the text of README and book.
    for (place, block) in crate::book::yaml_of_pages()? {
        // Others are the agent's configuration and records.
        if block.lines().any(|line| line.starts_with("apiVersion:")) {
            let objects = documents(&block).with_context(|| format!("{place}:\n{block}"))?;
            all.extend(objects.into_iter().map(|object| (place.clone(), object)));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::judge;
    use serde_json::json;

    #[test]
    fn an_object_nobody_has_published_is_found() {
        let odd = json!({"apiVersion": "example.com/v1", "kind": "Odd", "metadata": {"name": "a"}});
        assert_eq!(judge(&[odd]), [r#"Odd -/a: there is no schema for "Odd" of "example.com/v1""#]);
    }
}
