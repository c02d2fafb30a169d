//! KubeVirt's node hook: VMs are served without the API server, and start once their volumes are ready.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use support::netns::run;

use super::node::{
    HERE, Node, PATIENCE, eventually_gets, gets, may_run, wait_for, wait_until_namespace_is_gone,
};

const PATH: &str = "/v1/user-data";
const METHOD: &str = "/kubevirt.hooks.plugins.v1alpha1.NodeHookService/ExecuteNodeHook";

/// A length-delimited field of a protobuf message (wire type 2).
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut length = bytes.len();
    while length >= 0x80 {
        field.push(length as u8 | 0x80);
        length >>= 7;
    }
    field.push(length as u8);
    field.extend(bytes);
    field
}

/// Calls the hook as virt-handler does, using curl's HTTP/2. Returns the gRPC status.
fn call(node: &Node, point: &str, vmi: &Value) -> String {
    let message = [
        field(1, point.as_bytes()),
        field(2, vmi.to_string().as_bytes()),
        field(3, &field(1, HERE.as_bytes())),
    ]
    .concat();
    let length = u32::try_from(message.len()).expect("a short message").to_be_bytes();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), [&[0][..], &length, &message].concat()).expect("written");
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--http2-prior-knowledge", "--noproxy", "*", "--max-time"]);
    curl.arg(PATIENCE.as_secs().to_string()).args(["--dump-header", "-", "--output", "/dev/null"]);
    curl.arg("--unix-socket")
        .arg(socket(node))
        .arg("--data-binary")
        .arg(format!("@{}", file.path().display()));
    curl.args(["-Hcontent-type: application/grpc", "-Hte: trailers"])
        .arg(format!("http://localhost{METHOD}"));
    let output = run(&mut curl).unwrap_or_else(|error| panic!("{point}: {error:#}"));
    let status = output.lines().find_map(|line| line.strip_prefix("grpc-status:"));
    status.unwrap_or_else(|| panic!("{point}: no status: {output}")).trim().to_owned()
}

fn socket(node: &Node) -> PathBuf {
    node.path("hook.sock")
}

#[test]
fn a_vm_known_only_from_the_hook_is_served_and_starts_once_its_secret_exists() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let hook = socket(&node);
    node.configure(&json!({"watch": false, "hook": hook}));
    let agent = node.agent();
    let mut pod = node.pod(1);
    let vmi = pod.vmi();
    pod.launch();
    // 14 is UNAVAILABLE; virt-handler calls again.
    assert_eq!(call(&node, "PreVMStart", &vmi), "14", "{}", agent.log());
    pod.secret("# hooked\n");
    wait_for(&agent, "its start", || {
        anyhow::ensure!(call(&node, "PreVMStart", &vmi) == "0", "the hook does not let the VM start");
        Ok(())
    });
    assert_eq!(node.instances().expect("instances").len(), 1, "the record exists when the VM may start");
    let guest = pod.boot();
    eventually_gets(&agent, &guest, PATH, "# hooked\n");
    // The hook announces the target of a migration before the target has a launcher or a tap.
    let mut coming = node.pod(2);
    assert_eq!(call(&node, "PreMigrationTarget", &coming.vmi()), "0");
    coming.secret("# coming\n");
    coming.launch();
    let other = coming.boot();
    eventually_gets(&agent, &other, PATH, "# coming\n");
    let outer = pod.end(guest);
    assert_eq!(call(&node, "PostVMStop", &vmi), "0");
    wait_until_namespace_is_gone(&agent, &node, &outer);
    gets(&other, PATH, "# coming\n").expect("the other is served");
}
