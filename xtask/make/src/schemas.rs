//! `cargo xtask schemas`: makes the extract in `tests/schemas` from published schemas.
//!
//! Tests check objects against the extract without a network. Keywords that only describe (descriptions, defaults) or
//! control merging are left out. An unknown keyword is an error, so that no rule is lost unnoticed.

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args as Arguments;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::sha256;

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
            definitions.insert(kind, with_metadata(prune(&schema)?));
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

// Keeps only the keywords of a schema that decide whether an object is valid.

/// Keywords that are copied unchanged.
const KEPT: [&str; 13] = [
    "type",
    "required",
    "enum",
    "pattern",
    "nullable",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
];
/// Keywords that describe, fill in defaults or control merging, and rules that `testbed::schema` does not check
/// (`format`, CEL).
const LEFT_OUT: [&str; 11] = [
    "description",
    "title",
    "default",
    "example",
    "format",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
    "x-kubernetes-patch-merge-key",
    "x-kubernetes-patch-strategy",
    "x-kubernetes-validations",
];
/// The definition of every object's metadata.
const METADATA: &str = "k8s.io.apimachinery.pkg.apis.meta.v1.ObjectMeta";
/// A map with arbitrary fields, which OpenAPI 2 cannot express.
const FREE: &str = "k8s.io.apimachinery.pkg.apis.meta.v1.FieldsV1";
const REFERENCE: &str = "#/definitions/";

/// Returns the wanted definitions and all that they refer to.
fn closure(definitions: &Value, mut wanted: Vec<String>) -> Result<BTreeSet<String>> {
    let mut needed = BTreeSet::new();
    while let Some(name) = wanted.pop() {
        let definition = definitions.get(&name).with_context(|| format!("no definition {name}"))?;
        if needed.insert(name) {
            references(definition, &mut wanted);
        }
    }
    Ok(needed)
}

fn references(schema: &Value, found: &mut Vec<String>) {
    match schema {
        Value::Object(words) => {
            let name = words.get("$ref").and_then(Value::as_str);
            found.extend(name.and_then(|name| name.strip_prefix(REFERENCE)).map(ToOwned::to_owned));
            words.values().for_each(|inner| references(inner, found));
        }
        Value::Array(several) => several.iter().for_each(|inner| references(inner, found)),
        _ => {}
    }
}

/// Returns the schema without the keywords of [`LEFT_OUT`].
fn prune(schema: &Value) -> Result<Value> {
    let words = schema.as_object().with_context(|| format!("expected a schema, found {schema}"))?;
    let mut kept = Map::new();
    for (word, value) in words {
        let value = match word.as_str() {
            "$ref" => {
                let name = value.as_str().and_then(|name| name.strip_prefix(REFERENCE));
                let name = name.with_context(|| format!("unexpected reference: {value}"))?;
                if name == FREE {
                    return Ok(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true}));
                }
                name.into()
            }
            "properties" => {
                let fields = value.as_object().context("expected properties to be a mapping")?;
                let fields = fields.iter().map(|(name, field)| Ok((name.clone(), prune(field)?)));
                Value::Object(fields.collect::<Result<_>>()?)
            }
            "items" => prune(value)?,
            "additionalProperties" if value.is_boolean() => value.clone(),
            "additionalProperties" => prune(value)?,
            // `x-kubernetes-int-or-string` already says which two types are valid.
            "anyOf" if words.contains_key("x-kubernetes-int-or-string") => continue,
            word if KEPT.contains(&word) => value.clone(),
            word if LEFT_OUT.contains(&word) => continue,
            word => bail!("unknown keyword `{word}`: {value}"),
        };
        kept.insert(word.clone(), value);
    }
    if words.get("format").is_some_and(|format| format == "int-or-string") {
        return Ok(json!({"x-kubernetes-int-or-string": true}));
    }
    Ok(kept.into())
}

/// Returns the schema of a CRD's kind in each served version, without the properties of its spec in `without`.
fn definitions_of_crd(crd: &Value, without: &[&str]) -> Result<Vec<(String, Value)>> {
    let spec = &crd["spec"];
    let text = |value: &Value| value.as_str().map(ToOwned::to_owned).context("the CRD lacks a name");
    let (group, kind) = (text(&spec["group"])?, text(&spec["names"]["kind"])?);
    let versions = spec["versions"].as_array().context("the CRD lacks versions")?;
    let served = versions.iter().filter(|version| version["served"] == true);
    served
        .map(|version| {
            let mut schema = version["schema"]["openAPIV3Schema"].clone();
            for property in without {
                let properties = schema["properties"]["spec"]["properties"].as_object_mut();
                let there = properties.and_then(|properties| properties.remove(*property));
                ensure!(there.is_some(), "cannot leave out {property}: the spec of {kind} lacks it");
            }
            let name = format!("{group}/{} {kind}", text(&version["name"])?);
            Ok((name, with_metadata(prune(&schema)?)))
        })
        .collect()
}

/// Adds the schema of the metadata. A CRD says only that there is metadata, because every API server knows its fields.
fn with_metadata(mut schema: Value) -> Value {
    schema["properties"]["metadata"] = json!({"$ref": METADATA});
    schema
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{closure, definitions_of_crd, prune};

    #[test]
    fn needed_definitions_are_found_through_circular_references() {
        let reference = |name: &str| json!({"$ref": format!("#/definitions/{name}")});
        let definitions = json!({
            "a": {"properties": {"b": reference("b")}}, "b": {"items": reference("c")},
            "c": {"additionalProperties": reference("a")}, "d": reference("a"),
        });
        let needed = closure(&definitions, vec!["a".into()]).expect("all are there");
        assert_eq!(needed.into_iter().collect::<Vec<_>>(), ["a", "b", "c"]);
        closure(&definitions, vec!["e".into()]).expect_err("there is no e");
    }

    #[test]
    fn deciding_keywords_are_kept_and_unknown_ones_are_an_error() {
        let schema = json!({"description": "d", "type": "object", "required": ["description"], "properties": {
            "description": {"type": "string", "description": "a field of this name", "default": ""},
            "size": {"type": "string", "format": "int-or-string"},
            "port": {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": true},
            "meta": {"default": {}, "$ref": "#/definitions/m"}}});
        let expected = json!({"type": "object", "required": ["description"], "properties": {
            "description": {"type": "string"},
            "size": {"x-kubernetes-int-or-string": true},
            "port": {"x-kubernetes-int-or-string": true},
            "meta": {"$ref": "m"}}});
        assert_eq!(prune(&schema).expect("a schema"), expected);
        for odd in [json!({"oneOf": []}), json!({"anyOf": []}), json!({"items": {"not": {}}}), json!(1)] {
            prune(&odd).expect_err(&odd.to_string());
        }
    }

    #[test]
    fn a_kind_is_taken_in_every_served_version() {
        let version = |name: &str, served: bool| {
            let spec =
                json!({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}});
            let schema =
                json!({"type": "object", "properties": {"metadata": {"type": "object"}, "spec": spec}});
            json!({"name": name, "served": served, "schema": {"openAPIV3Schema": schema}})
        };
        let crd = json!({"spec": {"group": "g", "names": {"kind": "K"},
            "versions": [version("v1", true), version("v1alpha1", false)]}});
        let found = definitions_of_crd(&crd, &["b"]).expect("a CRD");
        let [(name, schema)] = &found[..] else { panic!("{found:?}") };
        assert_eq!(name, "g/v1 K");
        assert_eq!(schema["properties"]["spec"]["properties"], json!({"a": {"type": "string"}}));
        assert!(schema["properties"]["metadata"]["$ref"].is_string());
        definitions_of_crd(&crd, &["c"]).expect_err("there is no c");
        assert_eq!(definitions_of_crd(&Value::Null, &[]).ok(), None);
    }
}
