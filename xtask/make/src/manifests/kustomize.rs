//! Renders the overlays with kubectl's kustomize.
//!
//! Debian 12's kubectl (1.20) has kustomize 2.0.3, which accepts directories only as `bases` and patches only as
//! `patchesStrategicMerge`. For such a kubectl, a copy of the tree with these two old fields is rendered. The objects
//! are the same.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The first minor version of kubectl with a kustomize newer than 2.0.3.
const FIRST_WITH_NEW_FIELDS: u64 = 21;

/// A kubectl, and a tree that it can read.
#[derive(Debug)]
pub(super) struct Kubectl {
    program: PathBuf,
    tree: PathBuf,
    _copy: Option<tempfile::TempDir>,
}

impl Kubectl {
    /// Finds kubectl by the variable `KUBECTL`, or on PATH.
    pub(super) fn find() -> Result<Self> {
        let program: PathBuf = match std::env::var_os("KUBECTL") {
            Some(path) => path.into(),
            None => {
                shell::tools::ensure(&[("kubectl", "kubernetes-client")])?;
                "kubectl".into()
            }
        };
        let tree = shell::top().join("deploy/kustomize");
        let minor = minor(&program)?;
        if minor >= FIRST_WITH_NEW_FIELDS {
            return Ok(Self { program, tree, _copy: None });
        }
        eprintln!("kubectl 1.{minor}: rendering a copy with the fields of kustomize 2.0.3");
        let room = tempfile::tempdir()?;
        let copy = room.path().join("kustomize");
        copy_tree(&tree, &copy)?;
        Ok(Self { program, tree: copy, _copy: Some(room) })
    }

    /// Renders an overlay as YAML.
    pub(super) fn render(&self, overlay: &str) -> Result<String> {
        let directory = self.tree.join("overlays").join(overlay);
        let output = Command::new(&self.program).arg("kustomize").arg(&directory).output()?;
        let messages = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl kustomize {}: {}", directory.display(), messages.trim());
        // Users would see a deprecation warning about our files, so it is an error.
        ensure!(
            messages.trim().is_empty() || self._copy.is_some(),
            "kubectl kustomize {overlay}: {}",
            messages.trim()
        );
        Ok(String::from_utf8(output.stdout)?)
    }
}

fn minor(program: &Path) -> Result<u64> {
    let output = Command::new(program).args(["version", "--client", "--output=json"]).output();
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    let version: Value =
        serde_json::from_slice(&output.stdout).context("expected kubectl's version as JSON")?;
    let minor =
        version["clientVersion"]["minor"].as_str().context("kubectl's version has no minor number")?;
    Ok(minor.trim_end_matches('+').parse()?)
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy_tree(&path, &copy)?;
        } else if path.ends_with("kustomization.yaml") {
            fs::write(&copy, with_old_fields(&fs::read_to_string(&path)?, from)?)?;
        } else {
            fs::copy(&path, &copy)?;
        }
    }
    Ok(())
}

/// Returns a kustomization with the fields of kustomize 2.0.3.
fn with_old_fields(text: &str, directory: &Path) -> Result<String> {
    let mut kustomization: Value = serde_yaml::from_str(text)?;
    let words = kustomization.as_object_mut().context("expected a kustomization to be a mapping")?;
    if let Some(Value::Array(resources)) = words.remove("resources") {
        let is_directory = |name: &Value| name.as_str().is_some_and(|name| directory.join(name).is_dir());
        let (bases, files): (Vec<_>, Vec<_>) = resources.into_iter().partition(is_directory);
        words.insert("bases".into(), bases.into());
        words.insert("resources".into(), files.into());
    }
    if let Some(Value::Array(patches)) = words.remove("patches") {
        let files: Vec<_> = patches.iter().map(|patch| patch["path"].clone()).collect();
        words.insert("patchesStrategicMerge".into(), files.into());
    }
    Ok(serde_yaml::to_string(&kustomization)?)
}

#[cfg(test)]
mod tests {
    use super::with_old_fields;
    use serde_json::{Value, json};
    use std::fs;

    #[test]
    fn directories_become_bases_and_patches_become_files() {
        let room = tempfile::tempdir().expect("a directory");
        fs::create_dir(room.path().join("base")).expect("a directory");
        let text = "kind: Kustomization\nresources: [base, a.yaml]\npatches:\n- path: p.yaml\n";
        let old: Value =
            serde_yaml::from_str(&with_old_fields(text, room.path()).expect("translated")).expect("YAML");
        let expected = json!({"kind": "Kustomization", "bases": ["base"], "resources": ["a.yaml"],
            "patchesStrategicMerge": ["p.yaml"]});
        assert_eq!(old, expected);
    }
}
