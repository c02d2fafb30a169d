//! The page at `/` of the metrics address, in a real browser: Debian's Chromium, without a display.
//!
//! The test speaks the DevTools protocol (<https://chromedevtools.github.io/devtools-protocol/>) over pipes: JSON
//! documents, each ended by a zero byte. The shell gives the browser the pipes as descriptors 3 and 4.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::agent::{Agent, PortArgument, arguments, binary};
use support::eventually::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::privileged;
use support::record::Identity;

/// Far more time than a step needs: only a fault reaches it.
const PATIENCE: Duration = Duration::from_secs(90);
/// Most messages of the browser until an answer.
const MESSAGES: usize = 10_000;

/// The browser, which ends with this value.
struct Browser {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    asked: u64,
    /// The tab.
    session: Option<String>,
    /// What the browser complains of: refused loads, errors of the script.
    complaints: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts the browser in a namespace, and opens a tab.
    fn open(ns: &Namespace, url: &str) -> Self {
        let profile = tempfile::tempdir().expect("a directory");
        let text = "exec chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run \
                    --disable-background-networking --disable-component-update --disable-sync \
                    --remote-debugging-pipe --user-data-dir=\"$1\" about:blank 3<&0 4>&1 0</dev/null 1>/dev/null 2>&1";
        let mut command = Command::new("sh");
        command.args(["-c", text, "sh"]).arg(profile.path()).env("HOME", profile.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = ns.spawn(&mut command).expect("chromium");
        let to = child.stdin.take().expect("a pipe");
        let from = BufReader::new(child.stdout.take().expect("a pipe"));
        let (session, complaints) = (None, Vec::new());
        let mut browser = Self { child, to, from, asked: 0, session, complaints, _profile: profile };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attach = json!({ "targetId": target, "flatten": true });
        let session = browser.call("Target.attachToTarget", attach)["sessionId"].clone();
        browser.session = session.as_str().map(str::to_owned);
        browser.call("Log.enable", json!({}));
        browser.call("Runtime.enable", json!({}));
        browser.call("Page.navigate", json!({ "url": url }));
        browser
    }

    /// Calls a method, and returns its result.
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.asked += 1;
        let mut message = json!({ "id": self.asked, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.to.write_all(format!("{message}\0").as_bytes()).expect("the browser reads");
        for _ in 0..MESSAGES {
            let mut bytes = Vec::new();
            self.from.read_until(0, &mut bytes).expect("the browser writes");
            assert_eq!(bytes.pop(), Some(0), "the browser has ended; is Debian's `chromium` installed?");
            let message: Value = serde_json::from_slice(&bytes).expect("JSON");
            match message["method"].as_str() {
                Some("Log.entryAdded" | "Runtime.exceptionThrown") => self.complaints.push(message),
                _ if message["id"] == self.asked => {
                    assert!(message["error"].is_null(), "{method}: {message}");
                    return message["result"].clone();
                }
                _ => {}
            }
        }
        panic!("{method}: no answer within {MESSAGES} messages");
    }

    /// The value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        self.evaluate(expression).unwrap_or_else(|result| panic!("{expression}: {result}"))
    }

    /// The value of an expression, or what it throws: a page that is being loaded has no body yet.
    fn evaluate(&mut self, expression: &str) -> Result<Value, Value> {
        let result =
            self.call("Runtime.evaluate", json!({ "expression": expression, "returnByValue": true }));
        if result["exceptionDetails"].is_null() { Ok(result["result"]["value"].clone()) } else { Err(result) }
    }

    /// Sets the size of the screen.
    fn resize(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    /// Waits until an expression of the page is true.
    fn wait_until(&mut self, expression: &str) {
        let held = eventually(PATIENCE, || {
            let value = self.evaluate(expression);
            anyhow::ensure!(value == Ok(true.into()), "{value:?}");
            Ok(())
        });
        held.expect(expression);
    }

    /// Waits until the text of the page has all parts.
    fn wait_for(&mut self, parts: &[&str]) -> String {
        let begun = Instant::now();
        loop {
            let text = self.evaluate("document.body.innerText").unwrap_or_default();
            let text = text.as_str().unwrap_or_default().to_owned();
            match parts.iter().find(|part| !text.contains(**part)) {
                None => return text,
                Some(part) => assert!(begun.elapsed() < PATIENCE, "no `{part}` in:\n{text}"),
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its other processes end with it.
        let _ = self.to.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        let ended = eventually(Duration::from_secs(5), || {
            self.child.try_wait()?.ok_or_else(|| anyhow::anyhow!("it still runs"))
        });
        if ended.is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The text of elements that are wider than the screen, or whose text is wider than they are and hidden.
const CUT: &str = "[...document.body.querySelectorAll('*')].filter(one => one.checkVisibility() &&
    !one.closest('thead, svg') && one.getClientRects().length &&
    (one.getBoundingClientRect().right > innerWidth + 1 ||
     getComputedStyle(one).overflowX !== 'visible' && one.scrollWidth > one.clientWidth + 1))
    .map(one => one.tagName + ' ' + one.textContent.slice(0, 40))";

#[test]
fn the_page_shows_the_node_and_a_vm_in_a_browser_and_finds_the_next_agent() {
    if !privileged::or_skip() {
        return;
    }
    let records = tempfile::tempdir().expect("a directory");
    let host = Host::new().expect("a node");
    let identity = Identity::of(0);
    identity.write(records.path(), 1).expect("a record");
    let guest = Guest::boot(&host, &Spec::of(&identity)).expect("a guest");
    let file = records.path().join("page");
    std::fs::create_dir(&file).expect("a directory");
    let file = file.join("config.yaml");
    std::fs::write(&file, "page: true\n").expect("a file");
    let port = PortArgument::new(guest.host_tap().name(), identity.mac);
    let mut words = arguments(records.path(), &[port]);
    words.extend(["--config".into(), file.into()]);
    let start =
        || Agent::start_binary(&binary().expect("an agent"), host.ns(), words.clone()).expect("an agent");
    let agent = start();

    let address = support::agent::METRICS;
    let mut browser = Browser::open(host.ns(), &format!("http://{address}/"));
    browser.resize(1_440, 900);
    let hostname = identity.hostname.as_str();
    browser.wait_for(&[hostname, "silent", "serving", "60 s ago"]);
    browser.wait_until("document.title.endsWith(': serving – xdp-imds')");
    let fetched = eventually(PATIENCE, || {
        guest.curl(&[&format!("http://{METADATA}/v1/user-data?q=hunter2")], PATIENCE)
    });
    fetched.expect("an answer");
    let text = browser.wait_for(&["nocloud", "/v1/user-data", "sent", "hub 0"]);
    assert!(!text.contains("hunter2"), "{text}");

    browser.value("document.querySelector('#vms button').focus()");
    guest.curl(&[&format!("http://{METADATA}/v1/meta-data")], PATIENCE).expect("an answer");
    browser.wait_for(&["/v1/meta-data"]);
    assert_eq!(
        browser.value("document.activeElement.textContent"),
        hostname,
        "a new document leaves the focus"
    );

    browser.value("document.querySelector('#vms button').click()");
    browser.wait_for(&["Close", "Steered by", "GET /v1/meta-data"]);
    let mac = identity.mac.to_string();
    browser.value(
        "getSelection().selectAllChildren([...document.querySelectorAll('#pages dt')]
         .find(one => one.textContent === 'MAC').nextElementSibling)",
    );
    browser.value("document.querySelector('#pages .asked li').id = 'before'");
    guest.curl(&[&format!("http://{METADATA}/v1/vendor-data")], PATIENCE).expect("an answer");
    browser.wait_for(&["GET /v1/vendor-data"]);
    assert_eq!(browser.value("getSelection().toString()"), *mac, "a new document leaves the selected text");
    assert_eq!(
        browser.value("document.getElementById('before').innerText.includes('/v1/meta-data')"),
        true,
        "a line stays with its request"
    );
    browser.wait_until(&format!("document.title.startsWith('{hostname} on ')"));

    for width in [360, 768, 1_440] {
        browser.resize(width, 900);
        assert_eq!(browser.value(CUT), json!([]), "at {width} pixels nothing is cut, with the pane");
    }
    browser.value("document.getElementById('close').click()");
    browser.wait_until("document.getElementById('vm').hidden");
    for width in [360, 768, 1_440] {
        browser.resize(width, 900);
        assert_eq!(browser.value(CUT), json!([]), "at {width} pixels nothing is cut");
        for column in ["status", "path"] {
            let seen =
                browser.value(&format!("document.querySelector('td.{column}').getClientRects().length"));
            assert_eq!(seen, 1, "{column} is shown at {width} pixels");
        }
    }

    browser.value("document.querySelector('#vms button').click()");
    browser.wait_for(&["Steered by"]);
    browser.value("history.back()");
    browser.wait_until("document.getElementById('vm').hidden");
    browser.value("history.forward()");
    browser.wait_for(&["Steered by"]);
    browser.value(
        "document.getElementById('filter').value = 'nobody'; document.getElementById('filter').oninput()",
    );
    browser.wait_for(&["0 of 1 VM match", "No VM matches this filter."]);
    assert_eq!(browser.value("document.querySelectorAll('#vms tr').length"), 0);
    assert_eq!(browser.value("location.hash"), format!("#vm={mac}&filter=nobody"));
    browser.call("Page.reload", json!({}));
    browser.wait_for(&["0 of 1 VM match", "Steered by"]);
    assert_eq!(
        browser.value("document.getElementById('filter').value"),
        "nobody",
        "a reload keeps the place"
    );
    assert_eq!(browser.complaints, Vec::<Value>::new(), "the policy allows all that the page does");

    agent.stop().expect("the agent stops");
    browser.wait_for(&["The agent is away"]);
    browser.wait_until("document.title.endsWith(': away – xdp-imds')");
    assert_eq!(browser.value("document.getElementById('state').textContent"), "away");
    // A file that is no record is a problem, which the next agent tells.
    std::fs::write(records.path().join("broken.yaml"), "vm: [").expect("a file");
    let _agent = start();
    browser.wait_until("document.getElementById('away').hidden");
    browser.wait_for(&["1 problem", "refused"]);
    browser.wait_until("document.title.endsWith(': 1 problem – xdp-imds')");
}
