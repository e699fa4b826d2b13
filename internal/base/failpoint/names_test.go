package failpoint_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/failpoint"
)

// TestNamesAreTheCalls reads the source: each point is in the list, and each of the list is in one
// place of the program. The steps of the packages below
// internal/node are points by being steps.
func TestNamesAreTheCalls(t *testing.T) {
	names, found := failpoint.Names(), inSource(t)
	if sorted := slices.Compact(slices.Sorted(slices.Values(names))); len(sorted) != len(names) {
		t.Errorf("a name stands twice in the list of %d", len(names))
	}
	for _, name := range names {
		if found[name] == 0 {
			t.Errorf("point %s is in the list and nowhere in the source", name)
		}
		if found[name] > 1 && !strings.HasPrefix(name, "node/") {
			t.Errorf("point %s is in %d places of the source", name, found[name])
		}
	}
	for name := range found {
		if !slices.Contains(names, name) {
			t.Errorf("point %s is in the source and not in the list", name)
		}
	}
}

// inSource counts the points in the program's source.
func inSource(t *testing.T) map[string]int {
	t.Helper()
	found := map[string]int{}
	visit := func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || filepath.Base(filepath.Dir(path)) == "failpoint" {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			for _, name := range pointsOf(t, filepath.ToSlash(path), file.Name.Name, n) {
				found[name]++
			}
			return true
		})
		return nil
	}
	for _, dir := range []string{"../../../internal", "../../../cmd"} {
		if err := filepath.WalkDir(dir, visit); err != nil {
			t.Fatal(err)
		}
	}
	return found
}

// pointsOf names the points that a piece of syntax is.
func pointsOf(t *testing.T, path, pkg string, n ast.Node) []string {
	inNode := strings.Contains(path, "/internal/node/")
	switch n := n.(type) {
	case *ast.CallExpr:
		return calls(t, inNode, pkg, n)
	case *ast.CompositeLit:
		if inNode {
			return steps(n)
		}
	case *ast.FuncDecl:
		if inNode && strings.EqualFold(n.Name.Name, "backwards") {
			return texts(n.Body, "undo/")
		}
	case *ast.ValueSpec:
		if id, ok := n.Type.(*ast.Ident); ok && pkg == "journal" && id.Name == "Stage" {
			return texts(n, "row/")
		}
	}
	return nil
}

// calls names the point that a call reaches.
func calls(t *testing.T, inNode bool, pkg string, call *ast.CallExpr) []string {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || len(call.Args) == 0 {
		return nil
	}
	name, written := text(call.Args[0])
	of, _ := f.X.(*ast.Ident)
	switch ours := of != nil && of.Name == "failpoint"; {
	case ours && f.Sel.Name == "ReachIn": // its names are found where they are made
	case ours && written:
		return []string{name}
	case ours && pkg != "machine":
		t.Errorf("%s: failpoint.%s needs a literal name", pkg, f.Sel.Name)
	case inNode && strings.EqualFold(f.Sel.Name, "after") && written:
		return []string{"node/" + name}
	}
	return nil
}

// texts are all strings below a piece of syntax.
func texts(n ast.Node, prefix string) (names []string) {
	ast.Inspect(n, func(n ast.Node) bool {
		if e, ok := n.(ast.Expr); ok {
			if name, ok := text(e); ok && name != "" {
				names = append(names, prefix+name)
			}
		}
		return true
	})
	return names
}

// steps names the steps of a list of them that are done, not undone.
func steps(list *ast.CompositeLit) (names []string) {
	array, ok := list.Type.(*ast.ArrayType)
	var elements []ast.Expr
	switch {
	case ok && isStep(array.Elt):
		elements = list.Elts
	case isStep(list.Type):
		elements = []ast.Expr{list}
	}
	for _, e := range elements {
		one, ok := e.(*ast.CompositeLit)
		if !ok || len(one.Elts) == 0 {
			continue
		}
		first := one.Elts[0]
		if kv, ok := first.(*ast.KeyValueExpr); ok {
			first = kv.Value
		}
		if name, ok := text(first); ok {
			names = append(names, "node/"+name)
		}
	}
	return names
}

func isStep(e ast.Expr) bool {
	if of, ok := e.(*ast.SelectorExpr); ok { // of another package
		e = of.Sel
	}
	id, ok := e.(*ast.Ident)
	return ok && strings.EqualFold(id.Name, "step")
}

func text(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}
