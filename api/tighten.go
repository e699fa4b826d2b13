//go:build ignore

// Tighten adds to CRDs our rules for a pod spec that a marker cannot express, because the
// type is not ours: that there is a container, and that names of containers are DNS labels.
// It removes the rules for the names of a claim's volumes, whose faults the claim's conditions tell.
// It removes the descriptions of Kubernetes' own types, which are most of the text: `kubectl explain pod.spec`
// has them, and an API server keeps each CRD several times in memory.
//
//	go run api/tighten.go api/crds/*.yaml
package main

import (
	"fmt"
	"os"

	"sigs.k8s.io/yaml"
)

func main() {
	for _, path := range os.Args[1:] {
		if err := tighten(path); err != nil {
			fmt.Fprintf(os.Stderr, "tighten %s: %v\n", path, err)
			os.Exit(1)
		}
	}
}

func tighten(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var crd map[string]any
	if err := yaml.Unmarshal(text, &crd); err != nil {
		return err
	}
	walk(crd)
	if at(crd, "spec", "names")["kind"] == "SandboxClaim" {
		versions := at(crd, "spec")["versions"].([]any)
		loosenVolumes(at(versions[0].(map[string]any), "schema", "openAPIV3Schema", "properties", "spec", "properties", "volumeClaimTemplates", "items"))
	}
	if text, err = yaml.Marshal(crd); err != nil {
		return err
	}
	return os.WriteFile(path, append([]byte("---\n"), text...), 0o644)
}

// walk finds the schemas of Kubernetes' own types below a node.
func walk(node any) {
	switch n := node.(type) {
	case []any:
		for _, item := range n {
			walk(item)
		}
	case map[string]any:
		if template, ok := n["podTemplate"].(map[string]any); ok {
			tightenContainers(at(template, "properties", "spec", "properties", "containers"))
			strip(at(template, "properties", "spec", "properties"))
		}
		if claims, ok := n["volumeClaimTemplates"].(map[string]any); ok {
			strip(at(claims, "items", "properties", "spec", "properties"))
		}
		if policy, ok := n["networkPolicy"].(map[string]any); ok {
			for _, rules := range []string{"ingress", "egress"} {
				strip(at(policy, "properties", rules, "items"))
			}
		}
		for _, child := range n {
			walk(child)
		}
	}
}

// strip removes the descriptions of a node and of all below it. A field that is called description stays.
func strip(node any) {
	switch n := node.(type) {
	case []any:
		for _, item := range n {
			strip(item)
		}
	case map[string]any:
		if _, is := n["description"].(string); is {
			delete(n, "description")
		}
		for _, child := range n {
			strip(child)
		}
	}
}

func tightenContainers(containers map[string]any) {
	containers["minItems"] = 1
	name := at(containers, "items", "properties", "name")
	name["maxLength"] = 63
	name["pattern"] = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
}

// loosenVolumes allows volumes without a name, and all names.
func loosenVolumes(volume map[string]any) {
	metadata := at(volume, "properties", "metadata")
	name := at(metadata, "properties", "name")
	delete(name, "maxLength")
	delete(name, "pattern")
	delete(metadata, "required")
	volume["required"] = []any{"spec"}
}

// at follows keys; what is not there ends the program, for then the schema has changed.
func at(node map[string]any, keys ...string) map[string]any {
	for _, k := range keys {
		node = node[k].(map[string]any)
	}
	return node
}
