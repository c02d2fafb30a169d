//! Writes the bill of materials of a binary as CycloneDX 1.5 (<https://cyclonedx.org/docs/1.5/json/>): the crates that it
//! is made of, with their licences and the digests that Cargo verified.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use shell::architecture::Architecture;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The agent's package.
const ROOT: &str = "metadata-user";

/// Kinds of dependencies whose code is in the binary.
const LINKED: &str = "normal,no-proc-macro";
/// Kinds of dependencies that make the binary, with macros and build scripts.
const USED: &str = "normal,build";

/// A package as `cargo tree` prints it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    name: String,
    version: String,
    licence: String,
}

/// Returns the bill of the binary that a source tree makes for an architecture.
pub(crate) fn of(top: &Path, architecture: Architecture) -> Result<Vec<u8>> {
    let lock = fs::read_to_string(top.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let tree = |edges| packages(&tree(top, architecture, edges)?);
    let bill = bill(&tree(LINKED)?, &tree(USED)?, &checksums(&lock))?;
    let mut text = serde_json::to_vec_pretty(&bill)?;
    text.push(b'\n');
    Ok(text)
}

/// Lists the agent's packages for an architecture. `cargo metadata` would not do: it resolves the features of the whole
/// workspace, and so lists crates that the agent does not have.
fn tree(top: &Path, architecture: Architecture, edges: &str) -> Result<String> {
    let mut cargo = shell::cargo(["tree", "--locked", "--quiet", "--package", ROOT, "--edges", edges]);
    cargo.args(["--prefix", "none", "--format", "{p}|{l}", "--target", architecture.triple()]);
    let output = cargo.current_dir(top).output().context("cannot run cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8(output.stdout)?)
}

/// Reads lines such as `ring v0.17.14|Apache-2.0 AND ISC` or `pest_derive v2.9.6 (proc-macro)|MIT`. Some end in ` (*)`.
fn packages(tree: &str) -> Result<BTreeSet<Package>> {
    let lines = tree.lines().filter(|line| !line.is_empty());
    let read = lines.map(|line| {
        let (package, licence) = line.split_once('|')?;
        let (name, rest) = package.split_once(" v")?;
        let version = rest.split(' ').next()?.to_owned();
        // Some crates still write MIT/Apache-2.0, which is not valid SPDX.
        let licence = licence.trim_end_matches(" (*)").replace('/', " OR ");
        Some(Package { name: name.to_owned(), version, licence })
    });
    read.collect::<Option<_>>().context("cargo tree prints packages in another form than expected")
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

fn bill(
    linked: &BTreeSet<Package>,
    used: &BTreeSet<Package>,
    checksums: &BTreeMap<String, String>,
) -> Result<Value> {
    let root =
        linked.iter().find(|package| package.name == ROOT).context("there is no package metadata-user")?;
    let all: BTreeSet<_> = linked.union(used).filter(|package| *package != root).collect();
    let components: Vec<_> =
        all.into_iter().map(|package| component(package, linked.contains(package), checksums)).collect();
    Ok(json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {
            "type": "application",
            "name": "xdp-imds",
            "version": root.version,
            "licenses": [{"expression": root.licence}],
        }},
        "components": components,
    }))
}

/// Describes a package. CycloneDX calls those `excluded` which are not there at run time.
fn component(package: &Package, is_linked: bool, checksums: &BTreeMap<String, String>) -> Value {
    let Package { name, version, licence } = package;
    let mut component = json!({
        "type": "library",
        "name": name,
        "version": version,
        "scope": if is_linked { "required" } else { "excluded" },
        "purl": format!("pkg:cargo/{name}@{version}"),
    });
    if !licence.is_empty() {
        component["licenses"] = json!([{"expression": licence}]);
    }
    if let Some(digest) = checksums.get(&format!("{name} {version}")) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": digest}]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::{Architecture, Value, bill, checksums, json, of, packages};
    use std::collections::BTreeMap;

    #[test]
    fn a_bill_lists_what_is_linked_and_what_only_builds() {
        let linked = "metadata-user v1.0.0 (/x/metadata-user)|MIT OR Apache-2.0\na v1.0.0|MIT/Apache-2.0\nb v1.2.0|MIT\n\
                      a v1.0.0|MIT/Apache-2.0 (*)\n";
        let used = format!("{linked}m v3.0.0 (proc-macro)|MIT\n");
        let lock = "[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"00ff\"\n\n[[package]]\nname = \"b\"\nversion = \"1.2.0\"\n";
        let bill =
            bill(&packages(linked).expect("packages"), &packages(&used).expect("packages"), &checksums(lock));
        let expected = json!([
            {"type": "library", "name": "a", "version": "1.0.0", "scope": "required", "purl": "pkg:cargo/a@1.0.0",
                "licenses": [{"expression": "MIT OR Apache-2.0"}], "hashes": [{"alg": "SHA-256", "content": "00ff"}]},
            {"type": "library", "name": "b", "version": "1.2.0", "scope": "required", "purl": "pkg:cargo/b@1.2.0",
                "licenses": [{"expression": "MIT"}]},
            {"type": "library", "name": "m", "version": "3.0.0", "scope": "excluded", "purl": "pkg:cargo/m@3.0.0",
                "licenses": [{"expression": "MIT"}]},
        ]);
        assert_eq!(bill.expect("a bill")["components"], expected);
    }

    /// Returns the components of the real bill by name, each with its scope and whether it has a digest.
    fn listed(architecture: Architecture) -> BTreeMap<String, (String, bool)> {
        let bill = of(shell::top(), architecture).expect("a bill");
        let bill: Value = serde_json::from_slice(&bill).expect("JSON");
        let components = bill["components"].as_array().expect("a list").iter();
        let text = |of: &Value| of.as_str().unwrap_or_default().to_owned();
        components.map(|one| (text(&one["name"]), (text(&one["scope"]), one["hashes"].is_array()))).collect()
    }

    #[test]
    fn all_dependencies_of_the_agent_s_crates_are_listed() {
        let mut cargo = shell::cargo(["metadata", "--no-deps", "--format-version=1", "--locked"]);
        let output = cargo.output().expect("cargo metadata");
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let packages = metadata["packages"].as_array().expect("a list");
        for architecture in Architecture::ALL {
            let listed = listed(architecture);
            let own = |one: &&Value| {
                one["name"] == "metadata-user" || listed.contains_key(one["name"].as_str().unwrap_or(""))
            };
            let dependencies =
                packages.iter().filter(own).flat_map(|one| one["dependencies"].as_array().expect("a list"));
            let mut count = 0;
            for one in dependencies
                .filter(|one| one["kind"].is_null() && one["optional"] == false && one["target"].is_null())
            {
                let name = one["name"].as_str().expect("a name");
                assert!(listed.contains_key(name), "{architecture:?}: {name}");
                count += 1;
            }
            assert!(count > 50, "{architecture:?}: only {count} dependencies found");
        }
    }

    #[test]
    fn a_crate_from_the_registry_has_a_digest_and_the_scope_of_its_use() {
        for architecture in Architecture::ALL {
            let listed = listed(architecture);
            for (name, expected) in [
                ("ring", Some(("required", true))),
                ("aya", Some(("required", true))),
                ("metadata-links", Some(("required", false))),
                ("serde_derive", Some(("excluded", true))),
                ("cc", Some(("excluded", true))),
                // Only tests and other programs of the workspace, and features that nobody enables, have these.
                ("proptest", None),
                ("rpm", None),
                ("defmt", None),
            ] {
                let found = listed.get(name).map(|(scope, digest)| (scope.as_str(), *digest));
                assert_eq!(found, expected, "{architecture:?}: {name}");
            }
        }
    }
}
