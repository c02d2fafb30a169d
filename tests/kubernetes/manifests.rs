//! The manifests fit the agent: it can read the configuration, has the capabilities it needs and no other, answers the
//! probes, and exports every metric of an alert or a panel. `cargo xtask manifests` checks the rest against schemas.

use metadata_feed::memory_budget;
use metadata_user::config::Config;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::apiserver::ApiServer;
use support::packages::{Packages, With};
use support::schema::Schemas;

/// A metric that is Prometheus's own.
const UP: &str = "up";
/// Functions, keywords and labels in our PromQL expressions that are not metrics.
const WORDS: &str = "\
    absent and by code hub histogram_quantile increase instance job le on rate reason sum time verdict \
    without or";

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

fn read(path: &str) -> String {
    fs::read_to_string(deploy().join(path)).expect(path)
}

fn documents(path: &str) -> Vec<Value> {
    let text = read(path);
    serde_yaml::from_multiple(&text).expect(path)
}

#[test]
fn the_packaged_unit_bounds_memory_and_lets_vms_outlive_the_agent() {
    let unit = read("systemd/xdp-imds.service");
    let setting = |name: &str| {
        let mut values = unit.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        values.next().unwrap_or_else(|| panic!("{name} is not set"))
    };
    let gib: u64 = setting("MemoryMax").strip_suffix('G').and_then(|gib| gib.parse().ok()).expect("GiB");
    // Two workers is what an eighth of the limit has room for.
    assert!(memory_budget::within(Some(gib << 30), 2) >= memory_budget::DEFAULT_BYTES, "{gib} GiB");
    assert!(((gib << 30) / 8) as usize / memory_budget::WORKER_BYTES == 2, "{gib} GiB");
    // libvirt and Proxmox VE leave QEMU at 0. The kernel adds thousandths of all memory, so only 1000 is beyond a VM
    // that has all of it.
    assert_eq!(setting("OOMScoreAdjust"), "1000");
}

fn agent() -> Value {
    documents("kustomize/base/daemonset.yaml")[0]["spec"]["template"]["spec"]["containers"][0].clone()
}

#[test]
fn the_agent_can_read_the_configuration_and_its_paths_are_mounted() {
    let room = tempfile::tempdir().expect("a directory");
    let mounts: Vec<String> = agent()["volumeMounts"]
        .as_array()
        .expect("mounts")
        .iter()
        .map(|mount| mount["mountPath"].as_str().expect("a path").to_owned())
        .collect();
    for overlay in ["base", "overlays/kubevirt", "overlays/everything"] {
        let path = &format!("kustomize/{overlay}/configmap.yaml");
        let text = documents(path)[0]["data"]["config.yaml"].as_str().expect("a text").to_owned();
        let file = room.path().join("config.yaml");
        fs::write(&file, text).expect("written");
        let config = Config::read(&file).unwrap_or_else(|error| panic!("{path}: {error}"));
        let ports = &agent()["ports"];
        assert_eq!(ports[0]["containerPort"], config.metrics.expect("metrics").port(), "{path}");
        for needed in [config.records, config.state, config.pins, config.token_key, Some(config.run)] {
            let needed = needed.expect("each path is configured");
            assert!(
                mounts.iter().any(|mount| needed.starts_with(mount)),
                "{path}: {} is not mounted",
                needed.display()
            );
        }
    }
}

#[test]
fn the_agent_has_the_capabilities_it_needs_and_no_other() {
    let security = agent()["securityContext"].clone();
    // The test `least_privilege` states these: four that every agent needs, BPF, SYS_PTRACE for namespaces named by a
    // process, and DAC_READ_SEARCH for files of other users.
    let needed =
        json!(["NET_ADMIN", "NET_RAW", "BPF", "SYS_ADMIN", "IPC_LOCK", "SYS_PTRACE", "DAC_READ_SEARCH"]);
    assert_eq!(security["capabilities"], json!({"drop": ["ALL"], "add": needed}));
    assert_eq!(security["privileged"], Value::Null);
    assert_eq!(security["readOnlyRootFilesystem"], true);
    let scc = documents("kustomize/overlays/openshift/scc.yaml").remove(0);
    assert_eq!(scc["allowedCapabilities"], needed);
    assert_eq!(scc["allowPrivilegedContainer"], false);
}

#[test]
fn an_update_takes_over_from_the_previous_agent_and_gives_it_time_to_drain() {
    let spec = documents("kustomize/base/daemonset.yaml").remove(0)["spec"].clone();
    let expected = json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}});
    assert_eq!(spec["updateStrategy"], expected);
    let words = json!(["serve", "--config=/etc/xdp-imds/config.yaml", "--takeover", "--linger"]);
    assert_eq!(agent()["args"], words);
    let grace = spec["template"]["spec"]["terminationGracePeriodSeconds"].as_u64().expect("seconds");
    assert!(grace > 2 * u64::from(Config::default().drain_seconds), "{grace}");
    for (probe, path) in
        [("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")]
    {
        assert_eq!(agent()[probe]["httpGet"], json!({"path": path, "port": "metrics"}), "{probe}");
    }
}

#[test]
fn an_update_on_the_host_network_never_runs_two_agents() {
    let overlay = &documents("kustomize/overlays/libvirt-host/daemonset.yaml")[0];
    assert_eq!(overlay["spec"]["template"]["spec"]["hostNetwork"], true);
    let update = &overlay["spec"]["updateStrategy"]["rollingUpdate"];
    assert_eq!(*update, json!({"maxUnavailable": 1, "maxSurge": 0}));
}

#[test]
fn the_role_allows_only_vmis_and_events_and_no_secrets() {
    let path = "kustomize/overlays/kubevirt/rbac.yaml";
    assert!(!read(path).contains("secrets"));
    let expected = json!([
        {"apiGroups": ["kubevirt.io"], "resources": ["virtualmachineinstances"], "verbs": ["list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    ]);
    assert_eq!(documents(path)[0]["rules"], expected);
}

/// The names of metrics in a PromQL expression.
fn metrics(expression: &str) -> BTreeSet<String> {
    // Braces and brackets hold labels and ranges with their values, not metrics.
    let mut bare = String::new();
    let mut depth = 0_u32;
    for character in expression.chars() {
        match character {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            _ if depth == 0 => bare.push(character),
            _ => {}
        }
    }
    bare.split(|character: char| !character.is_ascii_alphanumeric() && character != '_')
        .filter(|word| word.starts_with(|first: char| first.is_ascii_alphabetic()))
        .filter(|word| {
            WORDS.split(' ').all(|ours| ours != *word)
                && !["datasource", "outcome", "state", "source"].contains(word)
        })
        .map(ToOwned::to_owned)
        .collect()
}

/// The names of the agent's metrics, which are string literals in its sources.
fn known() -> BTreeSet<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../metadata-user/src/metrics");
    let files = fs::read_dir(&directory).expect("listed").map(|entry| entry.expect("an entry").path());
    let texts: String = files
        .chain([directory.with_extension("rs")])
        .filter(|path| path.file_stem().is_some_and(|stem| stem != "tests"))
        .map(|path| fs::read_to_string(path).expect("read"))
        .collect();
    texts
        .split('"')
        .filter(|text| text.starts_with("xdp_imds_") || text.starts_with("process_"))
        .map(Into::into)
        .collect()
}

/// The alerts that every installation gets.
const ALERTS: &str = "helm/xdp-imds/files/alerts.yaml";

fn alerts() -> Vec<Value> {
    documents(ALERTS)[0]["groups"][0]["rules"].as_array().expect("rules").clone()
}

#[test]
fn kustomize_and_the_chart_have_the_alerts_and_the_dashboard_of_hosts() {
    let rules = documents("kustomize/parts/monitoring/prometheusrule.yaml").remove(0);
    assert_eq!(rules["spec"], documents(ALERTS)[0]);
    let template = read("helm/xdp-imds/templates/prometheusrule.yaml");
    assert!(
        template.contains(r#".Files.Get "files/alerts.yaml""#) && !template.contains("alert:"),
        "{template}"
    );
    let [dashboard, copy] =
        ["helm/xdp-imds/files/xdp-imds.json", "kustomize/parts/monitoring/xdp-imds.json"].map(read);
    assert!(dashboard == copy, "the dashboards differ");
}

#[test]
fn every_alert_has_its_section_of_the_book() {
    let page = read("../docs/src/operate/alerts.md");
    let sections: BTreeSet<_> = page.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let alerts = alerts();
    let name = |alert: &'_ Value| alert["alert"].as_str().expect("a name").to_owned();
    for alert in &alerts {
        let runbook = alert["annotations"]["runbook_url"].as_str().unwrap_or_default();
        let (page, anchor) = runbook.split_once('#').unwrap_or_default();
        assert_eq!(page, "https://github.com/xdp-imds/xdp-imds/blob/main/docs/src/operate/alerts.md");
        assert_eq!(anchor, name(alert).to_lowercase());
    }
    let names: Vec<_> = alerts.iter().map(name).collect();
    assert_eq!(sections, names.iter().map(String::as_str).collect());
}

/// promtool evaluates the alerts on series of a cluster and of plain hosts.
#[test]
fn alerts_fire_for_the_right_node_in_clusters_and_on_hosts() {
    let Some(prometheus) = Packages::or_skip("bookworm", &["prometheus"], With::Nothing) else { return };
    let room = tempfile::tempdir().expect("a directory");
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/alerts/tests.yaml");
    fs::copy(tests, room.path().join("tests.yaml")).expect("copied");
    fs::copy(deploy().join(ALERTS), room.path().join("alerts.yaml")).expect("copied");
    let promtool = prometheus.root().join("usr/bin/promtool");
    for words in [["check", "rules", "alerts.yaml"], ["test", "rules", "tests.yaml"]] {
        let output = Command::new(&promtool).args(words).current_dir(room.path()).output().expect("it runs");
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "promtool {}: {text}", words.join(" "));
    }
}

#[test]
fn every_metric_of_an_alert_or_a_panel_exists() {
    let known = known();
    assert!(known.contains("xdp_imds_requests_total") && known.len() > 40, "{known:?}");
    let alerts = alerts();
    let dashboard: Value =
        serde_json::from_str(&read("kustomize/parts/monitoring/xdp-imds.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").clone();
    assert!(alerts.len() >= 8 && panels.len() >= 10);
    let expressions = alerts.iter().map(|alert| &alert["expr"]).chain(
        panels
            .iter()
            .flat_map(|panel| panel["targets"].as_array().expect("targets"))
            .map(|target| &target["expr"]),
    );
    for expression in expressions {
        let expression = expression.as_str().expect("an expression");
        let named = metrics(expression);
        assert!(!named.is_empty(), "{expression}");
        for name in named {
            let of_histogram =
                ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
            let exists = [&*name, of_histogram].iter().any(|name| known.contains(*name) || *name == UP);
            assert!(exists, "{name} in {expression} does not exist");
        }
    }
}

#[test]
fn metrics_are_distinguished_from_functions_labels_and_values() {
    let expression = r#"sum by (instance) (rate(xdp_imds_a_total{code=~"5..", x="up"}[10m])) > 0.01 * sum by (le) (up{job="b"})"#;
    assert_eq!(metrics(expression), ["up", "xdp_imds_a_total"].map(ToOwned::to_owned).into());
}

#[test]
fn the_guide_to_the_manifests_names_every_alert() {
    let guide = fs::read_to_string(deploy().join("README.md")).expect("the guide");
    let rules = fs::read_to_string(deploy().join(ALERTS)).expect("the rules");
    let names = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    let missing: Vec<_> = names.filter(|name| !guide.contains(&format!("`{name}`"))).collect();
    assert_eq!(missing, [""; 0]);
    assert!(rules.contains("- alert: XdpImdsDown"), "the form of the rules");
}

// Objects of other projects match the schemas those projects publish: in manifests, in examples and in the API server
// of the tests. An unknown field is refused at any place.

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn published_documents(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_yaml::from_multiple(&text).expect("YAML")
}

/// Collects every YAML file below a directory.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("listed") {
        let path = entry.expect("an entry").path();
        match path.extension().and_then(|end| end.to_str()) {
            _ if path.is_dir() => files(&path, found),
            Some("yaml") => found.push(path),
            _ => {}
        }
    }
}

#[test]
fn manifests_and_examples_match_the_schemas_of_other_projects() {
    let mut paths = Vec::new();
    for directory in ["deploy/kustomize", "deploy/examples"] {
        files(&top().join(directory), &mut paths);
    }
    let mut kinds = BTreeSet::new();
    for path in paths {
        for object in published_documents(&path) {
            if Schemas::published().has(&object) {
                let found = Schemas::published().findings(&object);
                assert!(found.is_empty(), "{}: {found:?}", path.display());
                kinds.insert(object["kind"].as_str().unwrap_or_default().to_owned());
            }
        }
    }
    let expected = [
        "Certificate",
        "Issuer",
        "Plugin",
        "PodMonitor",
        "PrometheusRule",
        "SecurityContextConstraints",
        "VirtualMachine",
        "VirtualMachineInstance",
    ];
    assert_eq!(kinds, expected.map(ToOwned::to_owned).into());
}

/// Applies a JSON merge patch (RFC 7386), as the tables of the feed do.
fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        if !patch.is_null() {
            *into = patch.clone();
        }
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        match value {
            Value::Null => _ = into.as_object_mut().expect("an object").remove(key),
            value => merge(&mut into[key], value),
        }
    }
}

#[test]
fn the_vmis_of_the_feeds_tables_match_kubevirts_schema() {
    let fixtures = top().join("metadata-user/feed/src/kubevirt/translate/fixtures");
    let tables = published_documents(&fixtures.join("tables.yaml")).remove(0);
    let lines = |table: &str| tables[table].as_array().expect("a table").clone();
    let (bindings, sources, states) = (lines("bindings"), lines("sources"), lines("states"));
    let mut cases = 0;
    let mut unpublished = BTreeSet::new();
    for binding in &bindings {
        for source in &sources {
            for state in &states {
                let mut vmi = tables["base"]["vmi"].clone();
                [binding, source, state].iter().for_each(|line| merge(&mut vmi, &line["vmi"]));
                unpublished.extend(Schemas::published().findings(&vmi));
                cases += 1;
            }
        }
    }
    assert!(cases >= 300, "{cases} cases");
    // No KubeVirt release has VEP 100 yet; its text is in the `kubevirt/enhancements` repository.
    let of_vep_100 = ["metaData", "metaDataSecretRef"]
        .map(|field| format!(".spec.volumes[0].cloudInitNoCloud.{field} is not in the schema"));
    assert_eq!(unpublished, of_vep_100.into());
    let vmi = published_documents(&fixtures.join("vmi.json")).remove(0);
    assert_eq!(Schemas::published().findings(&vmi), [""; 0]);
}

/// Collects the JSON pointers of all mappings of an object, except mappings with keys that the user chooses.
fn mappings(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.push(path.to_owned());
            for (name, inner) in fields {
                if !["annotations", "labels", "matchLabels", "requests", "limits", "activePods"]
                    .contains(&&**name)
                {
                    mappings(inner, &format!("{path}/{name}"), found);
                }
            }
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(at, inner)| mappings(inner, &format!("{path}/{at}"), found));
        }
        _ => {}
    }
}

#[test]
fn an_unknown_field_is_refused_at_any_place() {
    let mut paths = Vec::new();
    files(&top().join("deploy"), &mut paths);
    paths.push(top().join("metadata-user/feed/src/kubevirt/translate/fixtures/vmi.json"));
    let mut places = 0;
    // The chart's templates are YAML only after rendering.
    for path in
        paths.into_iter().filter(|path| !path.components().any(|part| part.as_os_str() == "templates"))
    {
        for object in published_documents(&path).into_iter().filter(|object| Schemas::published().has(object))
        {
            let mut pointers = Vec::new();
            mappings(&object, "", &mut pointers);
            for pointer in pointers {
                let mut wrong = object.clone();
                let there = wrong.pointer_mut(&pointer).expect("a mapping");
                there["unknownField"] = json!(1);
                let found = Schemas::published().findings(&wrong);
                let is_right = found.len() == 1 && found[0].ends_with(".unknownField is not in the schema");
                assert!(is_right, "{} at {pointer}: {found:?}", path.display());
                places += 1;
            }
        }
    }
    assert!(places > 100, "{places} places");
}

#[test]
#[should_panic(expected = ".spec.domain.devices.interface is not in the schema")]
fn the_api_server_of_the_tests_refuses_fields_unknown_to_kubevirt() {
    let server = ApiServer::start().expect("a server");
    server.put(json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "a", "namespace": "n"}, "spec": {"domain": {"devices": {"interface": []}}}}));
}
