//! Writes the image's bill of materials as CycloneDX 1.5 (<https://cyclonedx.org/docs/1.5/json/>): the crates linked
//! for this target, with their licences and the digests that Cargo verified.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const TARGET: &str = "x86_64-unknown-linux-musl";
const ROOT: &str = "metadata-user";

/// Returns the list for a source tree.
pub(super) fn of(top: &Path) -> Result<Vec<u8>> {
    let mut cargo = shell::cargo(["metadata", "--format-version=1", "--locked", "--filter-platform", TARGET]);
    let output = cargo.current_dir(top).output().context("cannot run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let lock = fs::read_to_string(top.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let mut text = serde_json::to_vec_pretty(&bill(&metadata, &checksums(&lock))?)?;
    text.push(b'\n');
    Ok(text)
}

/// Returns the digests of Cargo.lock by `name version`.
fn checksums(lock: &str) -> BTreeMap<String, String> {
    let field = |block: &str, name: &str| {
        let line = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
        line.and_then(|rest| rest.strip_suffix('"')).map(ToOwned::to_owned)
    };
    let blocks = lock.split("[[package]]").skip(1);
    let found = blocks.filter_map(|block| {
        let key = format!("{} {}", field(block, "name")?, field(block, "version")?);
        Some((key, field(block, "checksum")?))
    });
    found.collect()
}

fn bill(metadata: &Value, checksums: &BTreeMap<String, String>) -> Result<Value> {
    let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
    let text = |of: &Value| of.as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, Value> =
        list(&metadata["packages"]).into_iter().map(|package| (text(&package["id"]), package)).collect();
    let nodes: BTreeMap<String, Value> =
        list(&metadata["resolve"]["nodes"]).into_iter().map(|node| (text(&node["id"]), node)).collect();
    let root = packages
        .iter()
        .find(|(_, package)| package["name"] == ROOT)
        .context("there is no package metadata-user")?
        .0;
    let mut linked = BTreeSet::new();
    let mut queue = vec![root.clone()];
    while let Some(id) = queue.pop() {
        if !linked.insert(id.clone()) {
            continue;
        }
        for dependency in list(&nodes.get(&id).context("a package is not resolved")?["deps"]) {
            // A linked dependency has the kind null; others have `build` or `dev`.
            if list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null()) {
                queue.push(text(&dependency["pkg"]));
            }
        }
    }
    let mut components: Vec<_> =
        linked.iter().filter(|id| *id != root).map(|id| component(&packages[id], checksums)).collect();
    components.sort_by_key(|component| component["purl"].to_string());
    Ok(json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {
            "type": "application",
            "name": "xdp-imds",
            "version": packages[root]["version"],
            "licenses": [{"expression": packages[root]["license"]}],
        }},
        "components": components,
    }))
}

fn component(package: &Value, checksums: &BTreeMap<String, String>) -> Value {
    let [name, version] = ["name", "version"].map(|field| package[field].as_str().unwrap_or_default());
    let mut component = json!({
        "type": "library",
        "name": name,
        "version": version,
        "purl": format!("pkg:cargo/{name}@{version}"),
    });
    // Some crates still write MIT/Apache-2.0, which is not valid SPDX.
    if let Some(licence) = package["license"].as_str() {
        component["licenses"] = json!([{"expression": licence.replace('/', " OR ")}]);
    }
    if let Some(digest) = checksums.get(&format!("{name} {version}")) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": digest}]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::{bill, checksums};
    use serde_json::json;

    #[test]
    fn linked_crates_are_listed_and_those_that_only_build_or_test_are_not() {
        let package = |name: &str, licence: &str| json!({"id": name, "name": name, "version": "1.0.0", "license": licence});
        let dependency = |name: &str, kind: Option<&str>| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [package("metadata-user", "MIT OR Apache-2.0"), package("a", "MIT/Apache-2.0"), package("b", "MIT"),
                package("cc", "MIT"), package("proptest", "MIT")],
            "resolve": {"nodes": [
                {"id": "metadata-user", "deps": [dependency("a", None), dependency("proptest", Some("dev"))]},
                {"id": "a", "deps": [dependency("b", None), dependency("cc", Some("build"))]},
                {"id": "b", "deps": []}, {"id": "cc", "deps": []}, {"id": "proptest", "deps": []}]},
        });
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"00ff\"\n\n[[package]]\nname = \"b\"\nversion = \"1.0.0\"\n";
        let bill = bill(&metadata, &checksums(lock)).expect("a list");
        let expected = json!([
            {"type": "library", "name": "a", "version": "1.0.0", "purl": "pkg:cargo/a@1.0.0",
                "licenses": [{"expression": "MIT OR Apache-2.0"}], "hashes": [{"alg": "SHA-256", "content": "00ff"}]},
            {"type": "library", "name": "b", "version": "1.0.0", "purl": "pkg:cargo/b@1.0.0",
                "licenses": [{"expression": "MIT"}]},
        ]);
        assert_eq!(bill["components"], expected);
    }
}
