//! `xdp-imds top` shows a node while its guests boot, and leaves the terminal as it was.

use metadata_control::top::{BootStage, Top, VmPage, VmRow};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};
use support::agent::{Agent, PortArgument, arguments, binary};
use support::eventually;
use support::guest::{Guest, METADATA, Spec};
use support::host::Host;
use support::netns::Namespace;
use support::record::Identity;
use support::scene::OneGuest;
use support::{agent, privileged, process};

const PATIENCE: Duration = Duration::from_secs(90);

fn shown(scene: &OneGuest, words: &[&str]) -> String {
    let Output { status, stdout, stderr } = top(&scene.file("run"), words);
    assert!(status.success(), "{words:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).expect("text")
}

fn document<T: serde::de::DeserializeOwned>(scene: &OneGuest, words: &[&str]) -> T {
    let text = shown(scene, &[words, &["--json"]].concat());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The only VM of the node.
fn only_row(scene: &OneGuest) -> VmRow {
    let top: Top = document(scene, &[]);
    assert_eq!(top.vms.len(), 1, "{top:?}");
    top.vms.into_iter().next().expect("a VM")
}

fn ask(scene: &OneGuest, path: &str) {
    scene.guest.curl(&[&format!("http://{METADATA}{path}")], PATIENCE).expect("an answer");
}

fn top(run: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(binary().expect("the agent is built"));
    command.arg("top").args(words).arg("--run").arg(run).output().expect("the verb runs")
}

#[privileged::test]
fn a_boot_is_followed_from_the_first_request_to_the_last() {
    let scene = OneGuest::with_record(|_| {});
    let agent = scene.agent();
    let row = only_row(&scene);
    assert_eq!((row.stage, row.requests, row.first, row.dialect), (BootStage::Silent, 0, None, None));
    assert_eq!(row.vm.as_ref(), Some(&scene.guest.identity().hostname));
    ask(&scene, "/v1/meta-data");
    ask(&scene, "/nowhere");
    let row = only_row(&scene);
    assert_eq!((row.dialect.as_deref(), row.requests), (Some("nocloud"), 2), "{row:?}");
    assert_eq!((row.path.as_deref(), row.status), (Some("/nowhere"), Some(404)), "{row:?}");
    assert!(!row.has_user_data && row.first >= row.last, "{row:?}");
    ask(&scene, "/v1/user-data?token=hunter2");
    let name = scene.guest.identity().mac.to_string();
    let pages: Vec<VmPage> = document(&scene, &[&name]);
    let paths: Vec<_> = pages[0].requests.iter().map(|request| (&*request.path, request.status)).collect();
    assert_eq!(paths, [("/v1/user-data", 200), ("/nowhere", 404), ("/v1/meta-data", 200)]);
    assert!(pages[0].row.has_user_data && pages[0].held.is_some(), "{pages:?}");
    let top: Top = document(&scene, &[]);
    assert!(top.traffic.requests == 3 && top.traffic.per_second.is_some(), "{top:?}");
    let quiet = eventually(PATIENCE, || {
        anyhow::ensure!(only_row(&scene).stage == BootStage::Quiet);
        Ok(())
    });
    quiet.expect("a guest without requests becomes quiet");
    let text = shown(&scene, &["--once"]);
    for part in ["xdp-imds ", " 1: 1 quiet", "nocloud", "/v1/user-data"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("q quit") && !text.contains("\n\n"), "keys and empty lines: {text}");
    assert!(!text.contains('\x1b') && !text.contains("hunter2"), "{text}");
    agent.stop().expect("the agent stops");
}

#[privileged::test]
fn a_guest_whose_record_is_late_waits_for_it() {
    let scene = OneGuest::boot(&Identity::of(0), |spec| spec);
    let _agent = scene.agent();
    let url = format!("http://{METADATA}/v1/meta-data");
    let mac = scene.guest.identity().mac.to_string();
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| scene.guest.curl(&[&url], PATIENCE));
        let held = eventually(PATIENCE, || {
            let pages: Vec<VmPage> = document(&scene, &[&mac]);
            let held = pages[0].held.map_or(0, |held| held.requests);
            anyhow::ensure!(held == 1 || asking.is_finished(), "{pages:?}");
            Ok(pages)
        });
        let pages = held.expect("the request is held");
        assert_eq!(pages[0].row.stage, BootStage::Unrecorded);
        assert_eq!(pages[0].row.waits_for.as_deref(), Some("its record"));
        scene.write(1, |_| {});
        drop(asking.join().expect("no panic"));
    });
    let served = eventually(PATIENCE, || {
        let row = only_row(&scene);
        anyhow::ensure!(row.stage != BootStage::Unrecorded, "{row:?}");
        Ok(())
    });
    served.expect("the record arrives");
}

#[privileged::test]
fn only_the_vms_that_match_a_filter_are_listed() {
    let scene = OneGuest::with_record(|_| {});
    let _agent = scene.agent();
    for (filter, matching) in [("SILENT", 1), ("nothing-is-called-so", 0), (scene.guest.host_tap().name(), 1)]
    {
        let top: Top = document(&scene, &["--filter", filter, "--sort", "name", "--limit", "1"]);
        assert_eq!((top.matching, top.vms.len() as u64), (matching, matching), "{filter}");
        assert_eq!(top.stages.values().sum::<u64>(), 1, "counts are of the whole node");
    }
    let long = "x".repeat(300);
    let refused = top(&scene.file("run"), &["--json", "--filter", &long]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("256 bytes"), "{said}");
}

#[test]
fn without_an_agent_the_printed_forms_fail_with_a_remedy() {
    let run = tempfile::tempdir().expect("a directory");
    for words in [&["--once"][..], &["--json"], &[]] {
        let Output { status, stderr, .. } = top(run.path(), words);
        let said = String::from_utf8_lossy(&stderr);
        assert!(!status.success() && said.contains("xdp-imds serve"), "{words:?}: {said}");
    }
}

/// `xdp-imds top` in a terminal of 80 × 24 by script(1).
struct InTerminal {
    script: Child,
    room: tempfile::TempDir,
}

impl InTerminal {
    /// Starts the view in a run directory without an agent, and waits until it shows that there is none.
    fn start(run: &Path) -> Self {
        Self::start_after("", run)
    }

    /// Like [`start`](Self::start), after commands of the shell.
    fn start_after(prefix: &str, run: &Path) -> Self {
        let room = tempfile::tempdir().expect("a directory");
        let (agent, path) = (binary().expect("the agent is built"), room.path().display());
        let text = format!(
            "{prefix}stty rows 24 cols 80; echo $$ > {path}/pid; TERM=xterm exec {} top --run {} --interval 0.2",
            agent.display(),
            run.display()
        );
        let mut script = Command::new("script");
        script.args(["--quiet", "--flush", "--return", "--command", &text, "/dev/null"]);
        let output = std::fs::File::create(room.path().join("output")).expect("a file");
        let script = script.stdin(Stdio::piped()).stdout(output).spawn().expect("script(1) of util-linux");
        let terminal = Self { script, room };
        terminal.wait_for(AWAY, 1);
        terminal
    }

    /// Waits until the terminal got a text this often.
    fn wait_for(&self, part: &str, times: usize) {
        let shown = eventually(PATIENCE, || {
            let text = self.text();
            anyhow::ensure!(text.matches(part).count() >= times, "{text:?}");
            Ok(())
        });
        shown.expect(part);
    }

    fn text(&self) -> String {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(self.room.path().join("output"));
        file.and_then(|mut file| file.read_to_end(&mut bytes)).expect("what the terminal got");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for the end; returns the exit code and what the terminal got.
    fn end(mut self) -> (Option<i32>, String) {
        let ended = eventually(PATIENCE, || {
            self.script.try_wait()?.ok_or_else(|| anyhow::anyhow!("the view has not ended"))
        });
        (ended.expect("an end").code(), self.text())
    }
}

impl Drop for InTerminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

/// The notice of the last line.
const AWAY: &str = "The agent is away";
/// Changes to the alternate screen and back (ctlseqs of xterm, `1049`).
const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";

#[test]
fn q_and_sigterm_leave_the_terminal_as_it_was() {
    for by_key in [true, false] {
        let run = tempfile::tempdir().expect("a directory");
        let mut terminal = InTerminal::start(run.path());
        if by_key {
            terminal.script.stdin.as_mut().expect("a pipe").write_all(b"q").expect("a key");
        } else {
            let pid = std::fs::read_to_string(terminal.room.path().join("pid")).expect("a PID");
            process::terminate(pid.trim().parse().expect("a PID")).expect("a process");
        }
        let keys = terminal.script.stdin.take();
        let (code, text) = terminal.end();
        drop(keys);
        assert_eq!(code, Some(0), "{text:?}");
        let (enter, leave) = (text.find(ENTER), text.rfind(LEAVE));
        assert!(enter.is_some() && enter < leave, "{text:?}");
    }
}

#[test]
fn the_view_ends_with_its_terminal_also_if_it_ignores_the_signal() {
    for prefix in ["", "trap '' HUP; "] {
        let run = tempfile::tempdir().expect("a directory");
        let mut terminal = InTerminal::start_after(prefix, run.path());
        let pid = std::fs::read_to_string(terminal.room.path().join("pid")).expect("a PID");
        terminal.script.kill().expect("it runs");
        terminal.script.wait().expect("it ends");
        let ended = eventually(PATIENCE, || {
            // Whoever inherits the process may leave it a zombie.
            let status = std::fs::read_to_string(format!("/proc/{}/status", pid.trim())).unwrap_or_default();
            anyhow::ensure!(status.is_empty() || status.contains("\nState:\tZ"), "{status}");
            Ok(())
        });
        ended.expect(prefix);
    }
}

#[privileged::test]
fn the_view_finds_an_agent_that_starts_and_says_when_it_is_gone() {
    let scene = OneGuest::with_record(|_| {});
    let terminal = InTerminal::start(&scene.file("run"));
    let agent = scene.agent();
    terminal.wait_for("serving", 1);
    terminal.wait_for(&scene.guest.identity().hostname, 1);
    agent.stop().expect("the agent stops");
    terminal.wait_for(AWAY, 2);
}

// The page at `/` of the metrics address, in a real browser: Debian's Chromium, without a display.
//
// The test speaks the DevTools protocol (<https://chromedevtools.github.io/devtools-protocol/>) over pipes: JSON
// documents, each ended by a zero byte. The shell gives the browser the pipes as descriptors 3 and 4.

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

/// Where the marks of 45, 30 and 15 seconds are below the chart, in percent of its width.
const MARKS: &str = "(area => [...document.querySelectorAll('.plot .x span')].slice(1, 4).map(mark => {
    const range = document.createRange();
    range.selectNodeContents(mark);
    const { left, right } = range.getBoundingClientRect();
    return Math.round(100 * ((left + right) / 2 - area.left) / area.width);
}))(document.querySelector('.area').getBoundingClientRect())";

#[privileged::test]
fn the_page_shows_the_node_and_a_vm_in_a_browser_and_finds_the_next_agent() {
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

    let address = agent::METRICS;
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
    guest
        .curl(&[&format!("http://{METADATA}/v1/vendor-data?next=http://hunter2/")], PATIENCE)
        .expect("an answer");
    browser.wait_for(&["GET /v1/vendor-data"]);
    assert_eq!(browser.value("getSelection().toString()"), *mac, "a new document leaves the selected text");
    assert_eq!(
        browser.value("document.getElementById('before').innerText.includes('/v1/meta-data')"),
        true,
        "a line stays with its request"
    );
    browser.wait_until(&format!("document.title.startsWith('{hostname} on ')"));
    let mut announce = Command::new(binary().expect("an agent"));
    announce.args(["event", "add", &mac, "--kind", "freeze", "--id", "drain-1", "--run"]);
    let announced = announce.arg(records.path().join("run")).output().expect("it runs");
    assert!(announced.status.success(), "{announced:?}");
    browser.wait_for(&["drain-1: freeze, scheduled"]);

    for width in [360, 768, 1_440] {
        browser.resize(width, 900);
        assert_eq!(browser.value(CUT), json!([]), "at {width} pixels nothing is cut, with the pane");
    }
    browser.value("document.getElementById('close').click()");
    browser.wait_until("document.getElementById('vm').hidden");
    for width in [360, 768, 1_440] {
        browser.resize(width, 900);
        assert_eq!(browser.value(CUT), json!([]), "at {width} pixels nothing is cut");
        assert_eq!(browser.value(MARKS), json!([25, 50, 75]), "at {width} pixels a mark is below its second");
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
