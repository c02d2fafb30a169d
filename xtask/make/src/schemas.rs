//! `cargo xtask schemas`: makes the extract in `tests/schemas` from published schemas.
//!
//! Tests check objects against the extract without a network. Keywords that only describe (descriptions, defaults) or
//! control merging are left out. An unknown keyword is an error, so that no rule is lost unnoticed.

mod prune;

use crate::image::sha256;
use anyhow::{Context as _, Result, ensure};
use clap::Args as Arguments;
use prune::{closure, definitions_of_crd, prune};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Whether to write the extract or to check it.
#[derive(Arguments)]
pub(crate) struct Args {
    /// Directory with the published files, named as in their URLs; by default they are fetched
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Only check that the extract is up to date
    #[arg(long)]
    check: bool,
}

const EXTRACT: &str = "tests/schemas/published.json";

/// A published file with schemas.
struct Source {
    project: &'static str,
    version: &'static str,
    url: &'static str,
    sha256: &'static str,
    form: Form,
}

/// The form of the schemas in a file.
enum Form {
    /// OpenAPI 2, with the wanted kinds of one API group.
    Swagger { group: &'static str, kinds: &'static [&'static str] },
    /// A CustomResourceDefinition. Properties of its spec that our objects do not use are left out.
    Crd { without: &'static [&'static str] },
    /// A schema as text in a Go map of schemas.
    Go { entry: &'static str, group: &'static str, kind: &'static str },
}

/// The schemas of KubeVirt 1.9.0 and of the other kinds that an overlay may have.
const SOURCES: [Source; 7] = [
    Source {
        project: "kubevirt/kubevirt",
        version: "v1.9.0",
        url: "https://raw.githubusercontent.com/kubevirt/kubevirt/79d34c1762169e5b0370ec491cef5ca12e6b504c/api/openapi-spec/swagger.json",
        sha256: "2c12b9c092941cff4dddabc65567e44a42c70d6b6c8a70d1c2a644f4960743c5",
        form: Form::Swagger { group: "kubevirt.io/v1", kinds: &["VirtualMachine", "VirtualMachineInstance"] },
    },
    Source {
        project: "kubevirt/kubevirt",
        version: "v1.9.0",
        url: "https://raw.githubusercontent.com/kubevirt/kubevirt/79d34c1762169e5b0370ec491cef5ca12e6b504c/pkg/virt-operator/resource/generate/components/validations_generated.go",
        sha256: "6663d916b1cde2bff317b9c97da4a7ff68340e539837a79a81add75be556dafc",
        form: Form::Go { entry: "plugin", group: "plugin.kubevirt.io/v1alpha1", kind: "Plugin" },
    },
    Source {
        project: "prometheus-operator/prometheus-operator",
        version: "v0.93.0",
        url: "https://raw.githubusercontent.com/prometheus-operator/prometheus-operator/f8fafd475f3d132e239432ae6172de60a6cb6516/example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        sha256: "45a93443daa687d3654f7e9631909ff7edcdf3ec09c5e60251b74aa2722aee5d",
        form: Form::Crd { without: &[] },
    },
    Source {
        project: "prometheus-operator/prometheus-operator",
        version: "v0.93.0",
        url: "https://raw.githubusercontent.com/prometheus-operator/prometheus-operator/f8fafd475f3d132e239432ae6172de60a6cb6516/example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        sha256: "78be98554b9c8506ab2b4f4feb91c5f3a56e536a0a510f3a8e876a459970d56d",
        form: Form::Crd { without: &[] },
    },
    Source {
        project: "cert-manager/cert-manager",
        version: "v1.21.1",
        url: "https://raw.githubusercontent.com/cert-manager/cert-manager/24e33194fb39488eff2bbf10c6dc640f407cad44/deploy/crds/cert-manager.io_certificates.yaml",
        sha256: "7ad91029c00ec959d54215b19d3b1a9b7e0247eaa60f987151c2b70d8661f8af",
        form: Form::Crd { without: &[] },
    },
    Source {
        project: "cert-manager/cert-manager",
        version: "v1.21.1",
        url: "https://raw.githubusercontent.com/cert-manager/cert-manager/24e33194fb39488eff2bbf10c6dc640f407cad44/deploy/crds/cert-manager.io_issuers.yaml",
        sha256: "05e37efb02777e0362d24269fa103c2fc11419f9c85e31854ef873e5d9e5c5cc",
        form: Form::Crd { without: &["acme", "vault", "venafi"] },
    },
    Source {
        project: "openshift/api",
        version: "2a3d73913b5a7caec4c57d5c3d04f51106ec4da3",
        url: "https://raw.githubusercontent.com/openshift/api/2a3d73913b5a7caec4c57d5c3d04f51106ec4da3/payload-manifests/crds/0000_03_config-operator_01_securitycontextconstraints.crd.yaml",
        sha256: "caeeb85886a16888227e7a924a9e8e861a7aa0cbf62cf0252a316f90692a2837",
        form: Form::Crd { without: &[] },
    },
];

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<()> {
    let made = extract(args.from.as_deref())?;
    let path = shell::top().join(EXTRACT);
    if args.check {
        let kept = fs::read_to_string(&path)?;
        ensure!(kept == made, "{EXTRACT} differs; run `cargo xtask schemas` and review the difference");
        println!("{EXTRACT} is up to date");
        return Ok(());
    }
    fs::write(&path, &made)?;
    println!("{EXTRACT}: {} bytes", made.len());
    Ok(())
}

fn extract(from: Option<&Path>) -> Result<String> {
    let mut kinds = Map::new();
    let mut definitions = Map::new();
    let mut sources = Vec::new();
    for source in &SOURCES {
        let text = read(source, from).with_context(|| source.url.to_owned())?;
        sources.push(json!({"project": source.project, "version": source.version, "url": source.url,
            "sha256": source.sha256, "licence": "Apache-2.0"}));
        take(source, &text, &mut kinds, &mut definitions).with_context(|| source.url.to_owned())?;
    }
    written(&sources, &kinds, &definitions)
}

fn take(
    source: &Source,
    text: &str,
    kinds: &mut Map<String, Value>,
    definitions: &mut Map<String, Value>,
) -> Result<()> {
    match &source.form {
        Form::Swagger { group, kinds: wanted } => {
            let swagger: Value = serde_json::from_str(text)?;
            let names: Vec<_> = wanted.iter().map(|kind| format!("v1.{kind}")).collect();
            for name in closure(&swagger["definitions"], names.clone())? {
                definitions.insert(name.clone(), prune(&swagger["definitions"][&name])?);
            }
            kinds.extend(
                wanted.iter().zip(names).map(|(kind, name)| (format!("{group} {kind}"), name.into())),
            );
        }
        Form::Crd { without } => {
            let crd = yaml(text)?;
            for (kind, schema) in definitions_of_crd(&crd, without)? {
                kinds.insert(kind.clone(), kind.clone().into());
                definitions.insert(kind, schema);
            }
        }
        Form::Go { entry, group, kind } => {
            let begins = format!("\"{entry}\": `openAPIV3Schema:\n");
            let at = text.find(&begins).with_context(|| format!("there is no entry {entry}"))? + begins.len();
            let schema = text[at..].split('`').next().unwrap_or_default();
            let schema = yaml(schema)?;
            let kind = format!("{group} {kind}");
            kinds.insert(kind.clone(), kind.clone().into());
            definitions.insert(kind, prune::with_metadata(prune(&schema)?));
        }
    }
    Ok(())
}

/// Parses a published definition, which may be longer than the parser's usual budget.
fn yaml(text: &str) -> Result<Value> {
    Ok(serde_yaml::from_str_with_options(text, serde_yaml::options! { budget: None })?)
}

/// Writes one definition per line, so that a changed definition is a changed line.
fn written(
    sources: &[Value],
    kinds: &Map<String, Value>,
    definitions: &Map<String, Value>,
) -> Result<String> {
    let mut text = String::from("{\n\"sources\": [\n");
    let lines: Vec<_> = sources.iter().map(Value::to_string).collect();
    write!(text, "{}\n],\n\"kinds\": {{\n", lines.join(",\n"))?;
    let listed = |of: &Map<String, Value>| -> Vec<String> {
        of.iter().map(|(name, value)| format!("{}: {value}", Value::from(name.as_str()))).collect()
    };
    write!(text, "{}\n}},\n\"definitions\": {{\n", listed(kinds).join(",\n"))?;
    write!(text, "{}\n}}\n}}\n", listed(definitions).join(",\n"))?;
    Ok(text)
}

/// Reads a source from a directory, or fetches it from its URL, and checks its digest.
fn read(source: &Source, from: Option<&Path>) -> Result<String> {
    let name = source.url.rsplit('/').next().unwrap_or_default();
    let path = match from {
        Some(directory) => directory.join(name),
        None => {
            let path = tempfile::tempdir()?.keep().join(name);
            let mut curl = Command::new("curl");
            curl.args(["--fail", "--silent", "--show-error", "--location", "--max-time", "60", "--output"]);
            shell::run(curl.arg(&path).arg(source.url))?;
            path
        }
    };
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let found = sha256(&text);
    ensure!(found == source.sha256, "expected SHA-256 {}, found {found}", source.sha256);
    Ok(String::from_utf8(text)?)
}
