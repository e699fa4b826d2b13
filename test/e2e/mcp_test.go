package e2e

import (
	"encoding/json"
	"os/exec"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// TestMCP has a program of an AI agent use sandboxes by the Model Context Protocol.
func TestMCP(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	cmd := exec.Command(programs.barchan, "mcp")
	cmd.Env = s.env
	agent, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), &sdk.CommandTransport{Command: cmd}, nil)
	if err != nil {
		t.Fatal(err)
	}
	call := func(tool string, args map[string]any, into any) {
		t.Helper()
		res, err := agent.CallTool(t.Context(), &sdk.CallToolParams{Name: tool, Arguments: args})
		if err != nil || res.IsError || len(res.Content) != 1 {
			t.Fatalf("%s: %v, %+v\n%s", tool, err, res, s.tail())
		}
		if err := json.Unmarshal([]byte(res.Content[0].(*sdk.TextContent).Text), into); err != nil {
			t.Fatal(err)
		}
	}
	type box struct {
		ID string `json:"sandbox_id"`
	}
	run := func(id, command string) string {
		t.Helper()
		var out struct {
			Stdout, Stderr string
			Code           int `json:"exit_code"`
		}
		call("run_command", map[string]any{"sandbox_id": id, "command": command}, &out)
		if out.Code != 0 {
			t.Errorf("%s: %+v", command, out)
		}
		return out.Stdout
	}
	var made, again box
	call("create_sandbox", map[string]any{"env": map[string]string{"WORD": "kept"}}, &made)
	call("write_file", map[string]any{"sandbox_id": made.ID, "path": "/tmp/square.py", "content": "print(7 * 7)"}, &struct{}{})
	if out := run(made.ID, "python3 /tmp/square.py; echo $WORD; nohup sleep 600 >/dev/null 2>&1 & echo $! >/tmp/pid"); out != "49\nkept\n" {
		t.Errorf("the program prints %q", out)
	}

	var forks struct {
		IDs []string `json:"sandbox_ids"`
	}
	call("fork_sandbox", map[string]any{"sandbox_id": made.ID, "count": 2}, &forks)
	if len(forks.IDs) != 2 {
		t.Fatalf("forks: %v", forks.IDs)
	}
	for _, id := range forks.IDs { // with its processes
		run(id, "kill -0 $(cat /tmp/pid)")
	}
	var snapshot struct {
		ID string `json:"snapshot_id"`
	}
	call("snapshot_sandbox", map[string]any{"sandbox_id": made.ID, "name": "squares"}, &snapshot)
	call("create_sandbox", map[string]any{"template": snapshot.ID}, &again)
	run(again.ID, "kill -0 $(cat /tmp/pid)")
	call("pause_sandbox", map[string]any{"sandbox_id": made.ID}, &struct{}{})
	run(made.ID, "kill -0 $(cat /tmp/pid)") // which resumes it

	if err := agent.Close(); err != nil {
		t.Error(err)
	}
	if left := s.sandboxes(); len(left) > 0 {
		t.Errorf("after the session there are %v", left)
	}
	s.must("snapshot", "rm", snapshot.ID)
}
