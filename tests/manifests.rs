//! The manifests fit the agent: it can read the configuration, has the capabilities it needs and no other, answers the
//! probes, and exports every metric of an alert or a panel. `cargo xtask manifests` checks the rest against schemas.

use metadata_feed::room;
use metadata_user::config::Config;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Metrics of other exporters: Prometheus itself and kube-state-metrics.
const OF_OTHERS: [&str; 2] = ["up", "kube_daemonset_status_number_unavailable"];
/// Functions, keywords and labels in our PromQL expressions that are not metrics.
const WORDS: [&str; 15] = [
    "absent",
    "by",
    "code",
    "histogram_quantile",
    "increase",
    "le",
    "max",
    "min",
    "node",
    "or",
    "rate",
    "reason",
    "sum",
    "time",
    "verdict",
];

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
    assert!(room::within(Some(gib << 30), 2) >= room::DEFAULT_OCTETS, "{gib} GiB");
    assert!(((gib << 30) / 8) as usize / room::WORKER_OCTETS == 2, "{gib} GiB");
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
        .filter(|word| !WORDS.contains(word) && !["datasource", "state", "source"].contains(word))
        .map(ToOwned::to_owned)
        .collect()
}

/// The names of the agent's metrics, which are string literals in its sources.
fn known() -> BTreeSet<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../metadata-user/src/metrics");
    let files = fs::read_dir(directory).expect("listed").map(|entry| entry.expect("an entry").path());
    let texts: String = files
        .filter(|path| path.file_stem().is_some_and(|stem| stem != "tests"))
        .map(|path| fs::read_to_string(path).expect("read"))
        .collect();
    texts
        .split('"')
        .filter(|text| text.starts_with("xdp_imds_") || text.starts_with("process_"))
        .map(Into::into)
        .collect()
}

#[test]
fn every_metric_of_an_alert_or_a_panel_exists() {
    let known = known();
    assert!(known.contains("xdp_imds_requests_total") && known.len() > 40, "{known:?}");
    let rules = documents("kustomize/parts/monitoring/prometheusrule.yaml").remove(0);
    let alerts = rules["spec"]["groups"][0]["rules"].as_array().expect("rules").clone();
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
            let exists =
                [&*name, of_histogram].iter().any(|name| known.contains(*name) || OF_OTHERS.contains(name));
            assert!(exists, "{name} in {expression} does not exist");
        }
    }
}

#[test]
fn metrics_are_distinguished_from_functions_labels_and_values() {
    let expression = r#"sum by (node) (rate(xdp_imds_a_total{code=~"5..", x="up"}[10m])) > 0.01 * max by (le) (up{job="b"})"#;
    assert_eq!(metrics(expression), ["up", "xdp_imds_a_total"].map(ToOwned::to_owned).into());
}
