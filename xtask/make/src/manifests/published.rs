//! Checks the examples, and kinds that Kubernetes does not define, against the schemas that their projects publish
//! (`tests/schemas`).

use super::documents;
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::fs;
use testbed::schema::Schemas;

const EXAMPLES: &str = "deploy/examples";
/// Files, and directories of files, in which fenced objects are examples too.
const TEXTS: [&str; 3] = ["README.md", "docs/src/operate", "docs/src/reference"];
/// The API version of files that kube-apiserver reads. Kubernetes publishes schemas of API objects only, so such a file
/// is checked for its form alone.
const UNPUBLISHED: &str = "apiserver.config.k8s.io/v1";

/// Returns the errors of objects, each with the object's title. A kind without a published schema is an error.
pub(super) fn judge(objects: &[Value]) -> Vec<String> {
    let of = |object: &Value| {
        let findings = Schemas::published().findings(object);
        findings.into_iter().map(|finding| format!("{}: {finding}", super::title(object))).collect::<Vec<_>>()
    };
    objects.iter().flat_map(of).collect()
}

/// Returns the examples, each with its file name.
pub(super) fn examples() -> Result<Vec<(String, Value)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(shell::top().join(EXAMPLES))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let objects = documents(&fs::read_to_string(&path)?).with_context(|| name.clone())?;
        all.extend(objects.into_iter().map(|object| (name.clone(), object)));
    }
    ensure!(!all.is_empty(), "there are no examples in {EXAMPLES}");
    for (name, text) in texts()? {
        for block in blocks(&text) {
            // Other blocks are configurations and records of the agent.
            if block.lines().any(|line| line.starts_with("apiVersion:")) {
                let mut objects = documents(&block).with_context(|| format!("{name}:\n{block}"))?;
                objects.retain(|object| object["apiVersion"] != UNPUBLISHED);
                all.extend(objects.into_iter().map(|object| (name.clone(), object)));
            }
        }
    }
    Ok(all)
}

/// Returns README and the book's pages, with their paths.
fn texts() -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    for place in TEXTS {
        let whole = shell::top().join(place);
        let paths: Vec<_> = match whole.is_dir() {
            true => fs::read_dir(&whole)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?,
            false => vec![whole],
        };
        for path in paths {
            let name = path.strip_prefix(shell::top())?.to_string_lossy().into_owned();
            all.push((name, fs::read_to_string(&path)?));
        }
    }
    Ok(all)
}

/// Returns the fenced YAML blocks of a Markdown text. Blocks may be indented.
fn blocks(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(indent) = line.find("```yaml").filter(|at| line[..*at].trim().is_empty()) else { continue };
        let inner = lines.by_ref().take_while(|line| line.trim() != "```");
        found.push(inner.map(|line| format!("{}\n", line.get(indent..).unwrap_or_default())).collect());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{blocks, judge};
    use serde_json::json;

    #[test]
    fn yaml_blocks_are_found_in_markdown() {
        let text = "a\n```yaml\nb: 1\n```\n```sh\nc\n```\n- d\n  ```yaml\n  e:\n    f: 2\n\n  g: 3\n  ```\n";
        assert_eq!(blocks(text), ["b: 1\n", "e:\n  f: 2\n\ng: 3\n"]);
    }

    #[test]
    fn an_object_without_a_published_schema_is_found() {
        let odd = json!({"apiVersion": "example.com/v1", "kind": "Odd", "metadata": {"name": "a"}});
        assert_eq!(judge(&[odd]), [r#"Odd -/a: there is no schema for "Odd" of "example.com/v1""#]);
    }
}
